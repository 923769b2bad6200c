-- Samples whose bytes are objects: which object is whose, and what may have left one behind.

ALTER TABLE samples ADD COLUMN attempt text COLLATE "C" NOT NULL DEFAULT '';  -- whose object it is; '' where it is none's

-- A row from before the first byte is sent until the sample's row names the object, or until the object is gone. What a bucket has
-- beside these two is nobody's.
CREATE TABLE attempts (
    attempt       text COLLATE "C" PRIMARY KEY,  -- a part of the object's key, never used twice
    namespace     text COLLATE "C" NOT NULL,
    sample_id     text COLLATE "C" NOT NULL,
    begun_unix_ns bigint NOT NULL,
    due_unix_ns   bigint NOT NULL,               -- open: when it expires, unless renewed; ended: from when its object may go
    ended         boolean NOT NULL
);
CREATE INDEX attempts_due ON attempts (due_unix_ns);
CREATE INDEX attempts_open ON attempts (begun_unix_ns) WHERE NOT ended;
CREATE INDEX attempts_of ON attempts (namespace, sample_id) WHERE NOT ended;

-- Objects that somebody is reading for long: they stay until then.
CREATE TABLE holds (
    attempt       text COLLATE "C" PRIMARY KEY,
    until_unix_ns bigint NOT NULL
);
CREATE INDEX holds_until ON holds (until_unix_ns);
