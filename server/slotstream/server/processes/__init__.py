"""The processes of `serve --workers N`, and how they speak to the primary one (v1/workers.proto).

workers       starts the workers, and keeps them running
worker        the program of a worker
remote_store  the store as a worker has it: what concerns the catalogue is asked of the primary
primary       the primary's answers
"""
