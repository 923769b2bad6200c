-- How many failed samples a peer may still leave here, through all servers together.

CREATE TABLE failure_shares (
    peer       text COLLATE "C" PRIMARY KEY,  -- xxh3-64 of its name, 16 hex characters
    remaining  double precision NOT NULL,
    at_unix_ns bigint NOT NULL                -- when that was so; it grows again
);
CREATE INDEX failure_shares_at ON failure_shares (at_unix_ns);
