-- The first tables. A migration that was released never changes, and a later one only adds: a server of the minor version
-- before runs on beside one of this.
--
-- Names and other texts sort by their bytes, whatever the database's own collation is (COLLATE "C").

CREATE SEQUENCE sample_numbers;

CREATE TABLE samples (
    id                bigint PRIMARY KEY DEFAULT nextval('sample_numbers'),
    namespace         text COLLATE "C" NOT NULL,
    sample_id         text COLLATE "C" NOT NULL,
    state             text COLLATE "C" NOT NULL CHECK (state IN ('arriving', 'committed', 'failed', 'deleting')),
    model             text COLLATE "C" NOT NULL,
    dtype             text COLLATE "C" NOT NULL,  -- safetensors spelling
    layer_ids         text COLLATE "C" NOT NULL,  -- JSON list, in the file's order
    hidden_size       bigint NOT NULL,            -- elements
    num_tokens        bigint NOT NULL,            -- rows; the most it can hold while arriving
    file_bytes        bigint NOT NULL,            -- 0 until committed
    created_unix_ns   bigint NOT NULL,
    committed_unix_ns bigint NOT NULL,            -- 0 until committed
    error_code        text COLLATE "C" NOT NULL,  -- stable code, when failed
    error_message     text COLLATE "C" NOT NULL,
    tags              text COLLATE "C" NOT NULL,  -- JSON object of strings
    metadata          text COLLATE "C" NOT NULL,  -- JSON object of strings: what the connector recorded
    header_xxh3       text COLLATE "C" NOT NULL,  -- xxh3-64 of the file's header, 16 hex characters
    reads             bigint NOT NULL,            -- how often every row was read to the end
    acked_unix_ns     bigint NOT NULL,            -- when a reader was done with it; 0 for never
    row_xxh3          bigint NOT NULL,            -- over all columns before it but the number
    UNIQUE (namespace, sample_id)
);
-- Listings: each filter walks one of them in the order of the pages.
CREATE INDEX samples_created ON samples (created_unix_ns, id);
CREATE INDEX samples_namespace ON samples (namespace, created_unix_ns, id);
CREATE INDEX samples_model ON samples (model, created_unix_ns, id);
CREATE INDEX samples_namespace_model ON samples (namespace, model, created_unix_ns, id);
CREATE INDEX samples_unfinished ON samples (state, created_unix_ns, id) WHERE state <> 'committed';
-- Walks over one namespace.
CREATE INDEX samples_walk ON samples (namespace, id);
-- Queues of retention.
CREATE INDEX samples_committed ON samples (namespace, committed_unix_ns, id) WHERE state = 'committed';
CREATE INDEX samples_committed_read ON samples (namespace, committed_unix_ns, id)
    WHERE state = 'committed' AND (reads > 0 OR acked_unix_ns > 0);
CREATE INDEX samples_read ON samples (namespace, reads, id) WHERE reads > 0 AND state = 'committed';
CREATE INDEX samples_acked ON samples (namespace, acked_unix_ns, id) WHERE acked_unix_ns > 0 AND state = 'committed';
CREATE INDEX samples_failed ON samples (namespace, created_unix_ns, id) WHERE state = 'failed';
CREATE INDEX samples_refused ON samples (namespace, created_unix_ns, id) WHERE state = 'failed' AND dtype = '';

-- One row a sample and tag, so that a tag filter is one index walk.
CREATE TABLE tags (
    key             text COLLATE "C" NOT NULL,
    value           text COLLATE "C" NOT NULL,
    created_unix_ns bigint NOT NULL,
    sample          bigint NOT NULL REFERENCES samples (id) ON DELETE CASCADE,
    PRIMARY KEY (key, value, created_unix_ns, sample)
);
CREATE INDEX tags_sample ON tags (sample);

-- Samples and bytes by namespace and state, as changes: their sum is what there is. A row that all writers change would have
-- them wait for each other. Servers fold many rows into one now and then.
CREATE TABLE deltas (
    id        bigint PRIMARY KEY GENERATED ALWAYS AS IDENTITY,
    namespace text COLLATE "C" NOT NULL,
    state     text COLLATE "C" NOT NULL,
    samples   bigint NOT NULL,
    bytes     numeric NOT NULL
);
CREATE INDEX deltas_namespace ON deltas (namespace);

CREATE FUNCTION count_new_samples() RETURNS trigger LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    INSERT INTO deltas (namespace, state, samples, bytes)
        SELECT namespace, state, count(*), sum(file_bytes) FROM new_rows GROUP BY namespace, state;
    RETURN NULL;
END $$;
CREATE FUNCTION count_old_samples() RETURNS trigger LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    INSERT INTO deltas (namespace, state, samples, bytes)
        SELECT namespace, state, -count(*), -sum(file_bytes) FROM old_rows GROUP BY namespace, state;
    RETURN NULL;
END $$;
CREATE FUNCTION count_changed_samples() RETURNS trigger LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    INSERT INTO deltas (namespace, state, samples, bytes)
        SELECT namespace, state, sum(samples), sum(bytes) FROM (
            SELECT namespace, state, 1 AS samples, file_bytes AS bytes FROM new_rows
            UNION ALL
            SELECT namespace, state, -1, -file_bytes FROM old_rows
        ) AS changes
        GROUP BY namespace, state HAVING sum(samples) <> 0 OR sum(bytes) <> 0;
    RETURN NULL;
END $$;
CREATE TRIGGER samples_inserted AFTER INSERT ON samples REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION count_new_samples();
CREATE TRIGGER samples_deleted AFTER DELETE ON samples REFERENCING OLD TABLE AS old_rows
    FOR EACH STATEMENT EXECUTE FUNCTION count_old_samples();
CREATE TRIGGER samples_updated AFTER UPDATE ON samples REFERENCING OLD TABLE AS old_rows NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION count_changed_samples();

-- Who holds which sample until when.
CREATE TABLE leases (
    namespace     text COLLATE "C" NOT NULL,
    sample_id     text COLLATE "C" NOT NULL,
    holder        text COLLATE "C" NOT NULL,  -- chosen by the reader
    until_unix_ns bigint NOT NULL,
    row_xxh3      bigint NOT NULL,
    PRIMARY KEY (namespace, sample_id, holder)
);
CREATE INDEX leases_until ON leases (until_unix_ns);

CREATE TABLE meta (key text COLLATE "C" PRIMARY KEY, value text COLLATE "C" NOT NULL);

-- The last transaction of each thread that writes. Who lost its connection at COMMIT finds here whether that one is committed.
CREATE TABLE writers (
    writer     uuid PRIMARY KEY,
    batch      bigint NOT NULL,
    written_at timestamptz NOT NULL
);

-- The clock by which leases end and ages count, Unix nanoseconds.
CREATE FUNCTION now_unix_ns() RETURNS bigint LANGUAGE sql VOLATILE
    AS $$ SELECT (extract(epoch FROM clock_timestamp()) * 1000000000)::bigint $$;
