"""How staged rows reach the server: one protocol (`base`), one module per data plane."""
