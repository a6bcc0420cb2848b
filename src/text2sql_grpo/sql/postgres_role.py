"""Rights of a PostgreSQL role for untrusted SQL: which are refused, and the SQL that creates such a role."""

import re
from collections.abc import Iterable, Sequence

from psycopg.sql import Identifier, Literal

COPY_PREFIX = "text2sql_copy_"  # of the databases and roles of test databases

# They read or write the server's files, or connect elsewhere. A role may call them if it was granted.
_FILE_FUNCTIONS = r"^(pg_read_file|pg_read_binary_file|pg_ls_dir|pg_stat_file|lo_import|lo_export|dblink\w*)$"
# Every role may call most of these unless an administrator revoked it, also in a read-only transaction. They
# end or cancel sessions, show what other sessions run, change settings, take locks that outlive a
# transaction, write large objects or the log, or run SQL given as text, in which a name may be put together.
_GUARDED = (
    r"pg_terminate_backend|pg_cancel_backend|pg_stat_(?:activity|replication|ssl|gssapi|get_activity|get_backend_\w+)"
    r"|pg_stat_statements\w*|set_config|setseed|pg_(?:try_)?advisory_\w+|loread|lowrite|pg_notify"
    r"|lo_(?:creat|create|export|from_bytea|get|import|lseek|lseek64|open|put|truncate|truncate64|unlink)"
    r"|pg_logical_emit_message|pg_export_snapshot|pg_current_xact_id|txid_current|pg_read_(?:binary_)?file\w*"
    r"|pg_ls_\w*dir|pg_stat_file|(?:query|cursor|table|schema|database)_to_xml\w*|ts_stat|ts_rewrite|dblink\w*"
    r"|pg_cursors?|pg_prepared_statements?|current_query|crosstab\w*|connectby|xpath_table|query_export_to_s3|http_(?:get|post|put|patch|delete|head)"
)
# Read-only; a member of another role of PostgreSQL's own may write, read files, or end sessions.
_READING_ROLES = (
    "('pg_read_all_data', 'pg_read_all_settings', 'pg_read_all_stats', 'pg_stat_scan_tables', 'pg_monitor')"
)
_SCHEMAS = "('pg_catalog'::regnamespace, 'information_schema'::regnamespace)"

# Rights with which no query is run; none of a role of `restricted_role_sql`.
EXCESS = f"""
    SELECT 'is a superuser' FROM pg_roles WHERE rolname = current_user AND rolsuper
    UNION ALL SELECT 'may create roles or databases, or replicate' FROM pg_roles
        WHERE rolname = current_user AND (rolcreaterole OR rolcreatedb OR rolreplication)
    UNION ALL SELECT 'is a member of ' || rolname FROM pg_roles
        WHERE rolname <> current_user AND pg_has_role(oid, 'MEMBER') AND (rolsuper
            OR rolcreaterole OR rolreplication OR rolname ~ '^pg_' AND rolname NOT IN {_READING_ROLES})
    UNION ALL SELECT 'may create schemas' WHERE has_database_privilege(current_database(), 'CREATE')
    UNION ALL SELECT 'may create tables in ' || nspname FROM pg_namespace
        WHERE has_schema_privilege(oid, 'CREATE') AND NOT has_schema_privilege('public', oid, 'CREATE')
            AND nspname !~ '^pg_(temp|toast_temp)_'
    UNION ALL SELECT 'may change ' || oid::regclass FROM pg_class
        WHERE relkind IN ('r', 'p', 'v', 'f') AND relnamespace NOT IN {_SCHEMAS}
            AND (has_table_privilege(oid, 'INSERT, UPDATE, DELETE, TRUNCATE')
                OR has_any_column_privilege(oid, 'INSERT, UPDATE'))
    UNION ALL SELECT 'may change the sequence ' || oid::regclass FROM pg_class
        WHERE CASE WHEN relkind = 'S' THEN has_sequence_privilege(oid, 'USAGE, UPDATE') END
    UNION ALL SELECT DISTINCT 'may call ' || proname FROM pg_proc
        WHERE proname ~ '{_FILE_FUNCTIONS}' AND has_function_privilege(oid, 'EXECUTE')
"""
# Functions that may do what their owner may. Views that call them are read as before.
DEFINERS = """
    SELECT DISTINCT proname FROM pg_proc WHERE prosecdef AND NOT pg_has_role(proowner, 'USAGE')
        AND has_function_privilege(oid, 'EXECUTE') AND has_schema_privilege(pronamespace, 'USAGE')
"""
# Run as any query is, so without a guarded name. Every role may create tables in `public` of a database that
# an older server than PostgreSQL 15 made.
HARMLESS_RIGHTS = r"""
    SELECT 'creating temporary tables' WHERE has_database_privilege(current_database(), 'TEMP')
    UNION ALL SELECT 'creating tables in ' || nspname FROM pg_namespace
        WHERE has_schema_privilege('public', oid, 'CREATE')
    UNION ALL SELECT 'taking advisory locks' WHERE EXISTS (SELECT FROM pg_proc
        WHERE proname LIKE 'pg\_advisory\_%' AND has_function_privilege(oid, 'EXECUTE'))
    UNION ALL SELECT 'running SQL given as text (*_to_xml)' WHERE EXISTS (SELECT FROM pg_proc
        WHERE proname LIKE 'query\_to\_xml%' AND has_function_privilege(oid, 'EXECUTE'))
    UNION ALL SELECT format('calling %s with the rights of its owner', oid::regprocedure) FROM pg_proc
        WHERE prosecdef AND NOT pg_has_role(proowner, 'USAGE') AND has_function_privilege(oid, 'EXECUTE')
            AND has_schema_privilege(pronamespace, 'USAGE')
"""
WHY_HARMLESS = (
    "each query runs in a read-only transaction that is rolled back, the session is reset after it, and a"
    " query that names such a function is refused"
)


def guard_of(definers: Iterable[str]) -> re.Pattern[str]:
    """Pattern of the names that no query may hold, wherever they stand in its text.

    A call needs the function's name: no function that runs SQL given as text may be called, and names
    with escapes (`U&"..."`) are refused.
    """
    own = "".join(f"|{re.escape(name)}" for name in sorted(definers))
    return re.compile(rf'(?<![a-z_$])(?:{_GUARDED}{own})(?![\w$])|u&"', re.IGNORECASE)


def restricted_role_sql(
    role: str, password: str, database: str, *, schemas: Sequence[str] = ("public",)
) -> str:
    """SQL that creates a role which can only read tables; run it in that database.

    The database's owner may run it if it may create roles. It grants rights to the new role, and changes no
    right of another role or of PUBLIC.
    """
    name, database_name = Identifier(role).as_string(), Identifier(database).as_string()
    settings = {
        "default_transaction_read_only": "on",
        "statement_timeout": "60s",  # each query gets a shorter one
        "lock_timeout": "1s",
        "idle_in_transaction_session_timeout": "60s",
        "work_mem": "16MB",
        "client_connection_check_interval": "200ms",  # a query ends soon after its client is gone
    }
    of_superusers = {
        "temp_file_limit": "256MB",
        "track_activities": "off",  # else a query is shown to other sessions of this role
    }
    lines = [
        f"CREATE ROLE {name} LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE NOREPLICATION NOINHERIT"
        f" PASSWORD {Literal(password).as_string()};",
        *(f"ALTER ROLE {name} SET {setting} = '{value}';" for setting, value in settings.items()),
        "DO $do$ BEGIN",
        *(f"  ALTER ROLE {name} SET {setting} = '{value}';" for setting, value in of_superusers.items()),
        "EXCEPTION WHEN insufficient_privilege THEN NULL; -- only a superuser may set these two",
        "END $do$;",
        f"GRANT CONNECT ON DATABASE {database_name} TO {name};",
    ]
    for schema in (Identifier(schema).as_string() for schema in schemas):
        lines += [
            f"GRANT USAGE ON SCHEMA {schema} TO {name};",
            f"GRANT SELECT ON ALL TABLES IN SCHEMA {schema} TO {name};",
        ]
    return "\n".join(lines)
