import secrets
import sys
from urllib.parse import quote

from text2sql_grpo.errors import ConfigError, needs_extra


def role(
    *,
    print: bool = False,
    name: str = "text2sql_reader",
    database: str = "postgres",
    schemas: list[str] | None = None,
) -> int:
    """Print the SQL that makes a PostgreSQL role which can only read tables, and its URL on stderr.

    Run it in that database, as its owner. Example: `text2sql-grpo role --print --database sales | psql sales`

    Args:
        print: Print them; nothing else is done.
        name: The role; its password is new each time.
        database: The database that it may read.
        schemas: Schemas that it may read; default: public.
    """
    if not print:
        raise ConfigError("nothing to do: add --print")
    with needs_extra("postgresql", "the SQL of a PostgreSQL role"):
        from text2sql_grpo.sql.postgres_role import restricted_role_sql
    password = secrets.token_urlsafe(18)
    sys.stdout.write(restricted_role_sql(name, password, database, schemas=schemas or ("public",)) + "\n")
    # Configs and run folders are shared, so that a URL with a password is refused there.
    url = f"postgresql://{quote(name, safe='')}@HOST/{quote(database, safe='')}"
    sys.stderr.write(f"afterwards: export PGPASSWORD={password}, and use {url}\n")
    return 0
