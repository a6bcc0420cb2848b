"""A small music store in the schema of the Chinook sample database, with invented rows.

    python examples/music_store.py store/databases

Writes `music_store.sqlite` into that folder, with the same rows every time. Chinook's columns for addresses,
phone numbers and file sizes are left out.
"""

import random
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

SCHEMA = """
CREATE TABLE Artist (ArtistId INTEGER PRIMARY KEY, Name TEXT NOT NULL);
CREATE TABLE Album (
  AlbumId INTEGER PRIMARY KEY, Title TEXT NOT NULL, ArtistId INTEGER NOT NULL REFERENCES Artist (ArtistId));
CREATE TABLE Genre (GenreId INTEGER PRIMARY KEY, Name TEXT NOT NULL);
CREATE TABLE MediaType (MediaTypeId INTEGER PRIMARY KEY, Name TEXT NOT NULL);
CREATE TABLE Track (
  TrackId INTEGER PRIMARY KEY, Name TEXT NOT NULL, AlbumId INTEGER REFERENCES Album (AlbumId),
  MediaTypeId INTEGER NOT NULL REFERENCES MediaType (MediaTypeId),
  GenreId INTEGER REFERENCES Genre (GenreId), Composer TEXT, Milliseconds INTEGER NOT NULL,
  UnitPrice DECIMAL(10, 2) NOT NULL);
CREATE TABLE Playlist (PlaylistId INTEGER PRIMARY KEY, Name TEXT NOT NULL);
CREATE TABLE PlaylistTrack (
  PlaylistId INTEGER REFERENCES Playlist (PlaylistId), TrackId INTEGER REFERENCES Track (TrackId),
  PRIMARY KEY (PlaylistId, TrackId));
CREATE TABLE Employee (
  EmployeeId INTEGER PRIMARY KEY, LastName TEXT NOT NULL, FirstName TEXT NOT NULL, Title TEXT NOT NULL,
  ReportsTo INTEGER REFERENCES Employee (EmployeeId), HireDate DATE NOT NULL, City TEXT NOT NULL);
CREATE TABLE Customer (
  CustomerId INTEGER PRIMARY KEY, FirstName TEXT NOT NULL, LastName TEXT NOT NULL, Company TEXT,
  City TEXT NOT NULL, Country TEXT NOT NULL, Email TEXT NOT NULL,
  SupportRepId INTEGER REFERENCES Employee (EmployeeId));
CREATE TABLE Invoice (
  InvoiceId INTEGER PRIMARY KEY, CustomerId INTEGER NOT NULL REFERENCES Customer (CustomerId),
  InvoiceDate DATE NOT NULL, BillingCountry TEXT NOT NULL, Total DECIMAL(10, 2) NOT NULL);
CREATE TABLE InvoiceLine (
  InvoiceLineId INTEGER PRIMARY KEY, InvoiceId INTEGER NOT NULL REFERENCES Invoice (InvoiceId),
  TrackId INTEGER NOT NULL REFERENCES Track (TrackId), UnitPrice DECIMAL(10, 2) NOT NULL,
  Quantity INTEGER NOT NULL);
"""
GENRES = ("Rock", "Jazz", "Metal", "Latin", "Reggae", "Classical", "Hip Hop/Rap", "R&B/Soul")
MEDIA_TYPES = ("MPEG audio file", "Protected AAC audio file", "Protected MPEG-4 video file")
PLAYLISTS = ("Music", "Grunge", "90s Music", "Brazilian Music", "On-The-Go 1", "Heavy Metal Classic")
TITLES = ("General Manager", "Sales Manager", "Sales Support Agent", "Sales Support Agent", "IT Staff")
PLACES = (
    *(("Prague", "Czech Republic"), ("Boston", "USA"), ("Chicago", "USA"), ("Leeds", "United Kingdom")),
    *(("Lyon", "France"), ("Recife", "Brazil"), ("Delhi", "India"), ("Oslo", "Norway")),
)
FIRST = [
    "Ada",
    "Bela",
    "Carla",
    "Dario",
    "Edda",
    "Femi",
    "Greta",
    "Hugo",
    "Iris",
    "Jonas",
    "Kofi",
    "Lena",
    "Marta",
    "Nils",
    "Olga",
    "Pavel",
]
LAST = [
    "Abel",
    "Brook",
    "Castell",
    "Dahl",
    "Eriks",
    "Fofana",
    "Gruber",
    "Haas",
    "Ivers",
    "Jansen",
    "Kovar",
    "Lindt",
    "Moreau",
    "Novak",
]
ADJECTIVES = [
    "Amber",
    "Broken",
    "Crystal",
    "Distant",
    "Electric",
    "Fading",
    "Golden",
    "Hollow",
    "Iron",
    "Lonely",
    "Midnight",
    "Paper",
]
NOUNS = [
    "Bridges",
    "Comets",
    "Echoes",
    "Gardens",
    "Harbours",
    "Lanterns",
    "Mirrors",
    "Rivers",
    "Shadows",
    "Trains",
    "Wolves",
]
PRICES = {1: 0.99, 2: 0.99, 3: 1.99}  # by media type


def write(folder: Path) -> Path:
    """Write the database and return its file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "music_store.sqlite"
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(SCHEMA)
        for table, rows in made_rows(random.Random(0)).items():
            marks = ", ".join("?" for _ in rows[0])
            connection.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)
        connection.commit()
    return path


def made_rows(rng: random.Random) -> dict[str, list[tuple[object, ...]]]:
    """Rows of every table."""

    def pairs(first: list[str], second: list[str], count: int) -> list[tuple[str, str]]:
        return rng.sample([(one, other) for one in first for other in second], count)

    def day(first_year: int, last_year: int) -> str:
        return f"{rng.randint(first_year, last_year)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"

    people = pairs(FIRST, LAST, 45)
    staff = [
        (i, last, first, title, None if i == 1 else 1 if i in (2, 5) else 2, day(2015, 2022), "Calgary")
        for i, ((first, last), title) in enumerate(zip(people, TITLES, strict=False), 1)
    ]
    customers = []
    for i, (first, last) in enumerate(people[5:], 1):
        company = rng.choice([None, f"{last} Ltd"])
        city, country = rng.choice(PLACES)
        email = f"{first}.{last}@example.org".lower()
        customers.append((i, first, last, company, city, country, email, rng.choice((3, 4))))
    tracks = []
    for i, (adjective, noun) in enumerate(pairs(ADJECTIVES, NOUNS, 120) * 2, 1):
        media = rng.choices((1, 2, 3), (6, 3, 1))[0]
        composer = rng.choice([None, " ".join(rng.choice(people))])
        name = f"{adjective} {noun} {'Song' if i <= 120 else 'Blues'}"
        length = rng.randint(95_000, 420_000)
        album, genre = rng.randint(1, 40), rng.randint(1, 8)
        tracks.append((i, name, album, media, genre, composer, length, PRICES[media]))
    invoices, lines = [], []
    for i in range(1, 161):
        customer = rng.choice(customers)
        bought = rng.sample(tracks, rng.randint(1, 4))
        total = round(sum(track[-1] for track in bought), 2)
        invoices.append((i, customer[0], day(2022, 2025), customer[5], total))
        lines += [(len(lines) + j, i, track[0], track[-1], 1) for j, track in enumerate(bought, 1)]
    return {
        "Artist": [(i, f"The {a} {n}") for i, (a, n) in enumerate(pairs(ADJECTIVES, NOUNS, 20), 1)],
        "Album": [
            (i, f"{n} of {a} Light", rng.randint(1, 20))
            for i, (a, n) in enumerate(pairs(ADJECTIVES, NOUNS, 40), 1)
        ],
        "Genre": list(enumerate(GENRES, 1)),
        "MediaType": list(enumerate(MEDIA_TYPES, 1)),
        "Track": tracks,
        "Playlist": list(enumerate(PLAYLISTS, 1)),
        "PlaylistTrack": [
            (playlist, track)
            for playlist in range(1, len(PLAYLISTS) + 1)
            for track in sorted(rng.sample(range(1, 241), 30))
        ],
        "Employee": staff,
        "Customer": customers,
        "Invoice": invoices,
        "InvoiceLine": lines,
    }


if __name__ == "__main__":
    print(f"wrote {write(Path(sys.argv[1]))}")
