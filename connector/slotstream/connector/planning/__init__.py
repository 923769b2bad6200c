"""The engine core's half of the connector: what is captured, decided for each step. No tensor is touched here."""
