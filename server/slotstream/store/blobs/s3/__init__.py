"""Objects in a bucket that speaks S3. Credentials, region and endpoint are botocore's: its variables and its files.

bucket    the operations
put       one object on its way
reading   one object being read
signing   URLs that are as good as credentials, for some minutes
requests  how a request is sent, and sent again
checking  whether the bucket and the credentials can do what is asked of them
address   s3://bucket/prefix
"""
