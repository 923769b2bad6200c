"""What owns samples from staging until the server's verdict. Imports neither torch nor vLLM."""
