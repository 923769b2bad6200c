"""What the sample's screen is made of: plain data, which the templates lay out and escape."""
