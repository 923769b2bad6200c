"""Who asks whether the server is well.

healthcheck  gRPC's standard health service
probes       the two questions of a kubelet, over plain HTTP
"""
