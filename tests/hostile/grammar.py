"""Random SQL of every statement kind in every nesting place, with odd spaces, comments and quotes."""

from random import Random

# Statements of each engine; `{p}` is a path beside the database, `{db}` the database itself.
STATEMENTS = {
    "sqlite": (
        *(
            "SELECT 1",
            "SELECT * FROM ward",
            "VALUES (1)",
            "SELECT count(*) FROM ward, ward a",
            "EXPLAIN SELECT 1",
        ),
        *(
            "INSERT INTO ward VALUES (9, 'x')",
            "REPLACE INTO ward VALUES (1, 'x')",
            "UPDATE ward SET name = 'x'",
        ),
        *("DELETE FROM ward", "DELETE FROM ward RETURNING id", "DROP TABLE ward", "CREATE TABLE z (a)"),
        *("CREATE TEMP VIEW ward AS SELECT 1", "CREATE TRIGGER z AFTER INSERT ON ward BEGIN SELECT 1; END"),
        *(
            "CREATE INDEX z ON ward (name)",
            "CREATE VIRTUAL TABLE z USING fts5(a)",
            "ALTER TABLE ward RENAME TO z",
        ),
        *("ATTACH '{p}' AS z", "DETACH main", "VACUUM", "VACUUM INTO '{p}'", "ANALYZE", "REINDEX"),
        *(
            "PRAGMA writable_schema = 1",
            "PRAGMA journal_mode = WAL",
            "PRAGMA user_version = 7",
            "BEGIN",
            "COMMIT",
        ),
        *(
            "SAVEPOINT z",
            "RELEASE z",
            "ROLLBACK",
            "SELECT load_extension('{p}')",
            "SELECT writefile('{p}', 1)",
        ),
        *("SELECT zeroblob(900000)", "SELECT printf('%.*c', 999999999, 'x')", "SELECT ?1, :a, @b, $c"),
    ),
    "duckdb": (
        *(
            "SELECT 1",
            "FROM ward",
            "VALUES (1)",
            "TABLE ward",
            "DESCRIBE ward",
            "SUMMARIZE ward",
            "SHOW TABLES",
        ),
        *(
            "PIVOT ward ON name USING count(*)",
            "UNPIVOT ward ON id",
            "EXPLAIN SELECT 1",
            "EXPLAIN ANALYZE FROM ward",
        ),
        *("INSERT INTO ward VALUES (9, 'x') RETURNING *", "UPDATE ward SET name = 'x' RETURNING *"),
        *("DELETE FROM ward RETURNING *", "TRUNCATE ward", "DROP TABLE ward", "CREATE TABLE z AS SELECT 1"),
        *("CREATE TEMP TABLE z (a INT)", "CREATE MACRO z() AS 1", "ALTER TABLE ward RENAME TO z", "VACUUM"),
        *("COPY (SELECT 1) TO '{db}' (FORMAT csv, USE_TMP_FILE false)", "COPY ward TO '{p}' (FORMAT csv)"),
        *("COPY (SELECT 1) TO '{db}.wal' (FORMAT blob)", "COPY ward FROM '{db}'", "EXPORT DATABASE '{p}'"),
        *(
            "IMPORT DATABASE '{p}'",
            "ATTACH '{p}' AS z",
            "DETACH clinic",
            "USE clinic",
            "CHECKPOINT",
            "INSTALL fts",
        ),
        *(
            "LOAD '{p}'",
            "UPDATE EXTENSIONS",
            "SET threads = 4",
            "RESET threads",
            "PRAGMA version",
            "BEGIN",
            "COMMIT",
        ),
        *("CALL pragma_version()", "PREPARE z AS SELECT 1", "EXECUTE z", "COMMENT ON TABLE ward IS 'x'"),
        *(
            "SELECT * FROM read_blob('{db}')",
            "FROM '{db}'",
            "FROM query('SELECT 42')",
            "SELECT nextval('numbers')",
        ),
        *(
            "FROM json_execute_serialized_sql('x')",
            "SELECT $1",
            "MERGE INTO ward USING ward w ON true WHEN MATCHED",
        ),
        *("SELECT DATE 'infinity', INTERVAL 1 DAY, [1], {{'a': 1}}", "SELECT * FROM test_all_types()"),
    ),
    "postgresql": (
        *(
            "SELECT 1",
            "TABLE ward",
            "VALUES (1)",
            "EXPLAIN SELECT 1",
            "EXPLAIN ANALYZE SELECT 1",
            "SHOW work_mem",
        ),
        *("INSERT INTO ward VALUES (9, 'x') RETURNING *", "UPDATE ward SET name = 'x' RETURNING *"),
        *("DELETE FROM ward RETURNING *", "TRUNCATE ward", "DROP TABLE ward", "CREATE TABLE z AS SELECT 1"),
        *(
            "MERGE INTO ward USING ward w ON true WHEN MATCHED THEN DELETE",
            "SELECT 1 INTO z",
            "CREATE TEMP TABLE z ()",
        ),
        *("COPY ward TO '{p}'", "COPY ward TO STDOUT", "COPY ward FROM STDIN", "COPY ward TO PROGRAM 'true'"),
        *(
            "DO $$ BEGIN END $$",
            "CALL z()",
            "LOCK TABLE ward",
            "LISTEN z",
            "NOTIFY z",
            "VACUUM",
            "ANALYZE",
            "BEGIN",
        ),
        *(
            "COMMIT",
            "ROLLBACK",
            "SAVEPOINT z",
            "SET ROLE admin",
            "RESET ALL",
            "DISCARD ALL",
            "PREPARE z AS SELECT 1",
        ),
        *(
            "EXECUTE z",
            "DECLARE z CURSOR FOR SELECT 1",
            "FETCH ALL FROM result",
            "CLOSE result",
            "GRANT ALL ON ward TO z",
        ),
        *(
            "SELECT nextval('numbers')",
            "SELECT set_config('role', 'admin', false)",
            "SELECT pg_read_file('{p}')",
        ),
        *("SELECT 10::numeric ^ 100000", "SELECT 'NaN'::numeric, date 'infinity', ARRAY[1]", "SELECT $1"),
        *(
            "SELECT repeat('x', 2000000)",
            "CREATE FUNCTION z() RETURNS int LANGUAGE sql AS 'SELECT 1'",
            "REINDEX TABLE ward",
        ),
    ),
}
PLACES = (
    *("{}", "{};", ";{}", "{};;", "({})", "(({}))", "{0}; {0}", "SELECT 1; {}", "{}; SELECT 1"),
    *("SELECT * FROM ({}) a", "SELECT ({})", "SELECT 1 WHERE EXISTS ({})", "SELECT 1 IN ({})"),
    *(
        "WITH x AS ({}) SELECT * FROM x",
        "WITH x AS MATERIALIZED ({}) SELECT 1",
        "WITH RECURSIVE x AS ({}) SELECT 1",
    ),
    *("SELECT 1 UNION ALL {}", "{} UNION ALL SELECT 1", "SELECT 1 UNION ({})", "SELECT 1 ORDER BY ({})"),
    *("EXPLAIN {}", "EXPLAIN ANALYZE {}", "EXPLAIN QUERY PLAN {}", "EXPLAIN (ANALYZE) {}", "DESCRIBE {}"),
    *(
        "SUMMARIZE {}",
        "PIVOT ({}) ON 1",
        "CREATE VIEW z AS {}",
        "CREATE TABLE z AS {}",
        "INSERT INTO ward {}",
    ),
    *(
        "PREPARE z AS {}",
        "COPY ({}) TO '{{p}}'",
        "DECLARE z CURSOR FOR {}",
        "SELECT CASE WHEN 1 THEN ({}) END",
    ),
    *("SELECT * FROM ward JOIN LATERAL ({}) a ON true", "SELECT '{}'", 'SELECT "{}"', "-- {}", "/* {} */"),
    *("SELECT count(*) FILTER (WHERE ({}) IS NULL)", "VALUES (({}))", "SELECT 1 LIMIT ({})", "EXECUTE {}"),
)
SPACES = (
    *(
        " ",
        "\n",
        "\t",
        "\r",
        "\v",
        "\f",
        "\r\n",
        "/**/",
        "/* x */",
        "--x\n",
        "-- '\n",
        "/* /* */ */",
        "\u00a0",
    ),
    *(
        "\u200b",
        "\ufeff",
        "\u2060",
        "\u3000",
        "\u2028",
        "\u0085",
        "\0",
        "\ud800",
        "'",
        '"',
        "$$",
        "`",
        "\\",
        ";",
    ),
)
MOST = 12  # places that are nested in each other


def random_sql(engine: str, random: Random, *, database: str, beside: str) -> str:
    """One text, as odd as the random numbers make it."""
    sql = (
        random.choice(STATEMENTS[engine]).replace("{p}", beside).replace("{db}", database).replace("{{", "{")
    )
    sql = sql.replace("}}", "}")
    depth = random.choice((0, 1, 1, 1, 2, 2, 3, MOST))
    for _ in range(depth):
        place = random.choice(PLACES).replace("{{p}}", beside)
        sql = place.replace("{0}", sql).replace("{}", sql) if len(sql) < 20_000 else sql
    words = sql.split(" ")
    for _ in range(random.choice((0, 0, 1, 2, 5))):
        index = random.randrange(len(words))
        words[index] = _odd(words[index], random)
    return " ".join(words)


def _odd(word: str, random: Random) -> str:
    kind = random.randrange(5)
    if kind == 0:
        return word + random.choice(SPACES)
    if kind == 1:
        return random.choice(SPACES) + word
    if kind == 2:
        return word.swapcase()
    if kind == 3:
        cut = random.randrange(len(word) + 1)
        return word[:cut] + random.choice(SPACES) + word[cut:]
    return f'"{word}"'
