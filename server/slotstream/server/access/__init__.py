"""Who may do what: tokens, certificates, and the gate that every call passes."""
