"""The worker's half of the connector: what touches the device, and staging memory."""
