"""Models whose hidden states state their own truth: the demo and the tests check every row against them."""
