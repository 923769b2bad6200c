"""What both ends agree on: frames, dtypes, hashes, names and limits, errors. Imports neither grpc, torch nor vllm."""
