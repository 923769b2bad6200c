"""Objects: whole samples under names that are never used twice, in a store that many servers share.

base  the Protocol
s3/   in a bucket; nothing else imports botocore or urllib3
"""
