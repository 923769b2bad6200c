"""What `Samples.Status` tells beside what the store knows.

engines  who is connected, and was
history  what was counted over the last hour
"""
