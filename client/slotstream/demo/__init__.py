"""`slotstream demo`: the whole path on one machine, with a model whose hidden states state their own truth."""
