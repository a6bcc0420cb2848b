"""PostgreSQL role for untrusted SQL: the SQL that creates it, and a check for excessive rights."""

from collections.abc import Sequence

from psycopg import Connection
from psycopg.sql import Identifier, Literal

# Every role may call these unless revoked, also in a read-only transaction. They end or cancel
# sessions, show what other sessions run, change settings, take locks that outlive a transaction, write large
# objects or the log, read files, or run SQL given as text.
FORBIDDEN_FUNCTIONS = (
    r"^(pg_terminate_backend|pg_cancel_backend|pg_stat_get_activity|pg_stat_get_backend_\w+|pg_stat_statements"
    r"|set_config|pg_(try_)?advisory_\w+|lo_\w+|loread|lowrite|pg_notify|pg_logical_emit_message"
    r"|pg_export_snapshot|pg_current_xact_id|txid_current|pg_read_(binary_)?file\w*|pg_ls_\w*dir|pg_stat_file"
    r"|(query|cursor|table|schema|database)_to_xml\w*|ts_stat|dblink\w*)$"
)

_EXCESS = f"""
    SELECT 'is a superuser' FROM pg_roles WHERE rolname = current_user AND rolsuper
    UNION ALL SELECT 'may create roles or databases, or replicate' FROM pg_roles
        WHERE rolname = current_user AND (rolcreaterole OR rolcreatedb OR rolreplication)
    UNION ALL SELECT 'is a member of ' || rolname FROM pg_roles
        WHERE rolname <> current_user AND pg_has_role(oid, 'MEMBER')
            AND (rolsuper OR rolname ~ '^pg_' AND rolname <> 'pg_read_all_data')
    UNION ALL SELECT 'may create temporary tables' WHERE has_database_privilege(current_database(), 'TEMP')
    UNION ALL SELECT 'may create schemas' WHERE has_database_privilege(current_database(), 'CREATE')
    UNION ALL SELECT 'may create tables in ' || nspname FROM pg_namespace
        WHERE has_schema_privilege(oid, 'CREATE')
    UNION ALL SELECT 'may change ' || oid::regclass FROM pg_class
        WHERE relkind IN ('r', 'p', 'v', 'f')
            AND (has_table_privilege(oid, 'INSERT, UPDATE, DELETE, TRUNCATE')
                OR has_any_column_privilege(oid, 'INSERT, UPDATE'))
            AND relnamespace NOT IN ('pg_catalog'::regnamespace, 'information_schema'::regnamespace)
    UNION ALL SELECT DISTINCT 'may call ' || proname FROM pg_proc
        WHERE proname ~ '{FORBIDDEN_FUNCTIONS}' AND has_function_privilege(oid, 'EXECUTE')
    UNION ALL SELECT 'may call ' || oid::regprocedure || ' with the rights of ' || proowner::regrole
        FROM pg_proc WHERE prosecdef AND NOT pg_has_role(proowner, 'USAGE')
            AND has_function_privilege(oid, 'EXECUTE') AND has_schema_privilege(pronamespace, 'USAGE')
"""


def excessive_rights(connection: Connection[tuple[str]]) -> list[str]:
    """Rights of the connected role beyond reading tables; empty for a role of `restricted_role_sql`."""
    return [row[0] for row in connection.execute(_EXCESS).fetchall()]


def restricted_role_sql(
    role: str, password: str, database: str, *, schemas: Sequence[str] = ("public",)
) -> str:
    """SQL that creates a role which can only read tables; run it as a superuser, in that database.

    It revokes rights from PUBLIC, that is from every role of this database without a grant of its own:
    temporary tables, new tables in `schemas`, `FORBIDDEN_FUNCTIONS` (advisory locks, large objects,
    set_config, ...), and functions that run with the rights of their owner. So use a database that no
    application shares. Run it again after `CREATE EXTENSION`, because an extension may add such functions.
    Needs PostgreSQL 14 or newer.
    """
    name, database_name = Identifier(role).as_string(), Identifier(database).as_string()
    settings = {
        "default_transaction_read_only": "on",
        "statement_timeout": "60s",  # each query gets a shorter one
        "lock_timeout": "1s",
        "idle_in_transaction_session_timeout": "60s",
        "work_mem": "16MB",
        "temp_file_limit": "256MB",
        "client_connection_check_interval": "200ms",  # a query ends soon after its client is gone
        "track_activities": "off",  # else a query can read those of other sessions of this role
    }
    lines = [
        f"CREATE ROLE {name} LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE NOREPLICATION NOINHERIT"
        f" PASSWORD {Literal(password).as_string()};",
        *(f"ALTER ROLE {name} SET {setting} = '{value}';" for setting, value in settings.items()),
        f"REVOKE TEMPORARY, CREATE ON DATABASE {database_name} FROM PUBLIC;",
        f"GRANT CONNECT ON DATABASE {database_name} TO {name};",
    ]
    for schema in (Identifier(schema).as_string() for schema in schemas):
        lines += [
            f"REVOKE CREATE ON SCHEMA {schema} FROM PUBLIC;",
            f"GRANT USAGE ON SCHEMA {schema} TO {name};",
            f"GRANT SELECT ON ALL TABLES IN SCHEMA {schema} TO {name};",
        ]
    lines.append(
        "DO $do$ DECLARE routine regprocedure; BEGIN FOR routine IN SELECT oid FROM pg_proc"
        f" WHERE prosecdef OR proname ~ '{FORBIDDEN_FUNCTIONS}'"
        " LOOP EXECUTE format('REVOKE EXECUTE ON ROUTINE %s FROM PUBLIC', routine); END LOOP; END $do$;"
    )
    return "\n".join(lines)
