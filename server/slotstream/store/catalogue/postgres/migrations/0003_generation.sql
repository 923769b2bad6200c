-- How old the catalogue is, for whoever compares it with the bucket: a dump that is restored has an older number than the bucket,
-- and a catalogue that was made anew another name.

CREATE TABLE generation (
    one       boolean PRIMARY KEY DEFAULT true CHECK (one),
    catalogue text COLLATE "C" NOT NULL,
    number    bigint NOT NULL
);
INSERT INTO generation (catalogue, number) VALUES (replace(gen_random_uuid()::text, '-', ''), 0);
