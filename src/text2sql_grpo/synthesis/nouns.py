"""Nouns: names of tables and columns as people say them, their plurals and articles."""

import re
from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import Any

import yaml
from spellchecker import SpellChecker

from text2sql_grpo.bundled import ROOT

_VOWELS = re.compile("[aeiouy]", re.I)
_NUMBERS = re.compile(r"(?<=[^\W\d_])\d+\b|(?<![^\W_])v?\d+(?![^\W_])")  # and versions
_PARTICIPLE = re.compile("..[^e]eds?$")


@cache
def vocabulary() -> Any:
    """Word lists of `data/vocabulary.yaml`."""
    return yaml.safe_load((ROOT / "data" / "vocabulary.yaml").read_text(encoding="utf-8"))


def identifier_words(name: str) -> str:
    """Words of an identifier.

    >>> identifier_words("unit_price"), identifier_words("UnitPrice"), identifier_words("Unit Price")
    ('unit price', 'unit price', 'unit price')
    """
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|[_\W]+", " ", name)
    return " ".join(spaced.lower().split())


def is_english(name: str) -> bool:
    """True if a name can be read aloud in English: of words, known short forms, or two words in one.

    >>> is_english("OrderLines"), is_english("playlist"), is_english("Kundenbestellungen")
    (True, True, False)
    """
    words = _parts(name)
    return bool(words) and all(_is_word(word) for part in words for word in part.split())


def _parts(name: str) -> list[str]:
    """Words of a name, short ones written out."""
    known = vocabulary()["words"]
    words = [known.get(part, part) for part in identifier_words(name).split()]
    if len(words) > 1:
        words[0] = {"no": "number", "n": "number", "stat": "status"}.get(words[0], words[0])
        words[-1] = {"no": "number", "CD": "code"}.get(words[-1], words[-1])
    return words


@cache
def _is_word(word: str) -> bool:
    known = vocabulary()
    if word in known["short"] or word in " ".join(known["words"].values()).split():
        return True
    dictionary, length = _dictionary(), len(word)
    if length < 4 or not word.isalpha():
        return False
    pairs = ((word[:place], word[place:]) for place in range(4, length - 3))
    return word in dictionary or any(first in dictionary and last in dictionary for first, last in pairs)


@cache
def _dictionary() -> Counter[str]:
    return Counter(SpellChecker(language="en").word_frequency.dictionary)


def without_layers(name: str, tables: Iterable[str] = ()) -> str:
    """Words of a table's name without numbers and the layers of a warehouse.

    A first word that may say what a row is (`raw_materials`) is a layer if several `tables` begin with it.

    >>> without_layers("stg_shop__OrderLines"), without_layers("raw_stores"), without_layers("stores_raw")
    ('order lines', 'raw stores', 'stores')
    >>> without_layers("raw_stores", ["raw_stores", "raw_items"])
    'stores'
    """
    known = vocabulary()
    entities = (each.rpartition("__")[2] or each for each in (name, *tables))  # dbt's stg_SOURCE__ENTITY
    words, *others = [_NUMBERS.sub(" ", identifier_words(each)).split() for each in entities]
    firsts = Counter(first for first, _ in {(one[0], singular(one[1])) for one in others if len(one) > 1})
    shared = {word for word in known["layers"] if firsts[word] > 1}
    while len(words) > 1 and words[0] in shared.union(known["prefixes"]):
        words = words[1:]
    while len(words) > 1 and words[-1] in (*known["prefixes"], "raw", "old"):
        words = words[:-1]
    return " ".join(words)


def table_noun(name: str, tables: Iterable[str] = ()) -> str | None:
    """Noun of one row of a table; None if its name is no noun that people would say and count.

    Args:
        name: Name of the table.
        tables: Names of all tables, see `without_layers`.

    >>> table_noun("Ref_OrderItems"), table_noun("Staff"), table_noun("Has_Pet"), table_noun("tblXQ7")
    ('order item', 'staff member', None, None)
    >>> table_noun("stg_orders"), table_noun("invoice_v2"), table_noun("t_007_ledgers2024")
    ('order', 'invoice', 'ledger')
    >>> table_noun("staff list"), table_noun("customers_export"), table_noun("price_list")
    ('staff member', 'customer', 'price list')
    >>> table_noun("calories"), table_noun("bias"), table_noun("biases"), table_noun("salespeople")
    ('calorie', 'bias', 'bias', 'salesperson')
    >>> table_noun("player_stats"), table_noun("bases"), table_noun("software"), table_noun("electricity")
    ('player stat', 'base', 'software product', None)
    """
    name = without_layers(name, tables)
    words = _spoken(name)
    if not words or not is_english(name) or set(words) & {"in", "per"}:
        return None
    units = vocabulary()["units"]
    if len(words) > 1 and words[-1] in ("list", "export") and (words[-2] in units or is_plural(words[-2])):
        words = words[:-1]
    unit = [units[words[-1]]] if words[-1] in units else []
    noun = singular_row(" ".join([*map(singular_row, words[:-1]), words[-1], *unit]))
    one, many = noun.split()[-1], plural(noun).split()[-1]
    is_common = one in vocabulary()["irregular"] or _dictionary()[many] * 200 >= _dictionary()[one]
    return noun if many == words[-1] or (_is_word(many) and is_common) else None


def column_noun(name: str, table: str) -> str | None:
    """Noun of a column: its name in quotes if it is no English noun; None if people would not ask about it.

    Args:
        name: Name of the column.
        table: Noun of its table, left out where the name begins with it.

    >>> column_noun("custFirstName", "customer"), column_noun("num_of_seats", "car")
    ('first name', 'number of seats')
    >>> column_noun("heightFoot", "car"), column_noun("HH", "dog"), column_noun("nameLast", "person")
    ('height in feet', '"HH"', 'last name')
    >>> column_noun("address_2", "dog"), column_noun("is_open", "shop"), column_noun("paid_by", "bill")
    ('"address_2"', '"is_open"', '"paid_by"')
    >>> column_noun("year", "film"), column_noun("guid", "film"), column_noun("filmid", "actor")
    ('year', None, None)
    >>> column_noun("order_created_at", "order"), column_noun("checked_on", "order")
    ('creation date', 'check date')
    """
    moment = _moment_words(name)
    words = moment or _spoken(name)
    if words is None or (words and not is_english(name)):
        return f'"{name}"'
    for size in range(len(table.split()), 0, -1):
        if len(words) > size and words[:size] in (table.split()[:size], table.split()[-size:]):
            words = words[size:]
            break
    if moment:
        return " ".join(words)
    if words[-2:] == ["of", table] and len(words) > 2:
        words = words[:-2]
    is_event = words[:1] == ["date"] and len(words) > 2 and words[1] != "of"  # "date became customer"
    if not words or is_event:
        return None
    if words[-1] in vocabulary()["endings"]:
        return f'"{name}"'
    unit = vocabulary()["measures"].get(words[-1])
    if unit and len(words) > 1 and words[0] != "number":
        words = [*(word for word in words[:-1] if word != "in"), "in", unit]
    if words[0] == "number" and len(words) > 1:
        words = ["number", "of", *words[1 + (words[1] == "of") :]]
        words[-1] = plural(singular(words[-1]))
    if words[0] == "name" and " ".join([*words[1:], "name"]) in vocabulary()["names"]:
        words = [*words[1:], "name"]
    if words[0] in ("amount", "date") and len(words) == 2 and words[1] not in ("due", "payable"):
        if words[1] not in (table, *vocabulary()["events"].values()):
            return f'"{name}"'
        words = words[:1] if words[1] == table else [words[0], "of", words[1]]
    return " ".join(words)


def words_of(noun: str) -> list[str]:
    """Words of a noun phrase; those of a name in quotes without numbers, short ones written out.

    >>> words_of("length in feet"), words_of('"via_addr2"')
    (['length', 'in', 'feet'], ['via', 'address'])
    """
    return " ".join(_parts(_NUMBERS.sub(" ", noun))).split() if '"' in noun else noun.split()


def is_flag_name(name: str) -> bool:
    """True for the name of a column that is true or false.

    >>> is_flag_name("is_bot"), is_flag_name("hasParking"), is_flag_name("island")
    (True, True, False)
    """
    words = identifier_words(name).split()
    return len(words) > 1 and (words[0] in vocabulary()["flags"] or words[-1] == "flag")


def flag_noun(name: str) -> str:
    """Noun of a column that is true or false.

    >>> flag_noun("is_bot"), flag_noun("active"), flag_noun("ist_gesperrt"), flag_noun("flag")
    ('bot flag', 'active flag', '"ist_gesperrt" flag', 'flag')
    """
    words = identifier_words(name).split()
    words = words[1:] if is_flag_name(name) and words[-1] != "flag" else words
    said = " ".join(words).removesuffix("flag").strip()
    return f"{said} flag".strip() if not said or is_english(said) else f'"{name}" flag'


def _moment_words(name: str) -> list[str]:
    """Words of the moment at which something happened; none for another column.

    >>> _moment_words("shippedDt"), _moment_words("based_at"), _moment_words("order_dt")
    (['shipping', 'date'], [], [])
    """
    words = identifier_words(name).split()
    if len(words) < 2 or words[-1] not in vocabulary()["moments"]:
        return []
    *before, event, _ = words
    return [*before, vocabulary()["events"][event], "date"] if event in vocabulary()["events"] else []


def count_noun(noun: str) -> str | None:
    """Noun of a column of numbers; None for a plural that may count or not.

    >>> count_noun("total passengers"), count_noun("scores")
    ('number of passengers', None)
    """
    words = noun.split()
    if {"of", "in", "per"} & set(words) or singular(words[-1]) == words[-1]:
        return noun
    if words[-1] not in vocabulary()["counts"] or words[0] in vocabulary()["no_sums"][:-1]:
        return None
    return " ".join(["number of", *(words[1:] if words[0] == "total" else words)])


def _spoken(name: str) -> list[str] | None:
    """Words of a name, short ones written out; none if it names a key, None if it is no noun."""
    words = " ".join(_parts(name)).split()
    is_key = any(word.endswith("id") and word not in (*vocabulary()["ids"], "id") for word in words)
    if not words or is_key or words[-1] in vocabulary()["keys"]:
        return []
    is_joined = set(words) & set(vocabulary()["joints"]) or {words[0], words[-1]} & {"of", "in", "per"}
    is_act = _PARTICIPLE.search(words[-1]) or (words[0] in vocabulary()["verbs"] and words != ["year"])
    return None if is_joined or is_act else words


@cache
def plural(noun: str) -> str:
    """Plural of a noun phrase, by the common rules.

    >>> plural("visit"), plural("city"), plural("foreman"), plural("date of birth")
    ('visits', 'cities', 'foremen', 'dates of birth')
    """
    prepositions = re.search(" (of|in|per|on|with) ", noun)
    head, preposition, rest = noun.partition(prepositions[0]) if prepositions else (noun, "", "")
    before, space, last = head.rpartition(" ")
    if last in vocabulary()["irregular"]:
        last = vocabulary()["irregular"][last]
    elif last.endswith('"'):
        last += " values"
    elif last.endswith("man") and last != "human":
        last = last[:-3] + "men"
    elif re.search(r"[^aeiou]y$", last):
        last = last[:-1] + "ies"
    elif re.search(r"(s|x|z|ch|sh)$", last):
        last += "es"
    else:
        last += "s"
    return before + space + last + preposition + rest


def is_plural(noun: str) -> bool:
    """True for a noun phrase in the plural.

    >>> is_plural("assets in billions"), is_plural("number of seats")
    (True, False)
    """
    head = re.split(" (?:of|in|per) ", noun)[0].split()[-1]
    return singular(head) != head


def with_article(noun: str) -> str:
    """Noun phrase with its indefinite article, by pronunciation.

    >>> with_article("hour"), with_article("age"), with_article("union flag"), with_article("visit")
    ('an hour', 'an age', 'a union flag', 'a visit')
    >>> with_article("SMS count"), with_article("US state"), with_article("IP address")
    ('an SMS count', 'a US state', 'an IP address')
    """
    if re.match(r"[A-Z][B-DF-HJ-NP-TV-Z]+\b", noun):  # spelled out
        return f"an {noun}" if noun[0] in "AEFHILMNORSX" else f"a {noun}"
    is_vowel = re.match("[aeiou]|hour|honou?r|x-", noun.lower()) and not re.match(
        "uni|use|one|eu", noun.lower()
    )
    return f"an {noun}" if is_vowel else f"a {noun}"


def singular_row(noun: str) -> str:
    """Singular of a table's name by the common rules; if these give no word, by rarer ones or as it is."""
    before, space, last = noun.rpartition(" ")
    forms = (singular(last), last.removesuffix("s"), last.removesuffix("es"))
    one = next((form for form in forms if form in _dictionary() or _is_word(form)), last)
    return singular(noun) if singular(noun) == noun else before + space + one


def singular(noun: str) -> str:
    """Singular of a noun phrase, which may be a plural.

    >>> singular("cities"), singular("order lines"), singular("addresses"), singular("status")
    ('city', 'order line', 'address', 'status')
    """
    before, space, last = noun.rpartition(" ")
    if last in vocabulary()["irregular"]:
        return noun
    ones: dict[str, str] = {many: one for one, many in vocabulary()["irregular"].items()}
    if last in ones:
        return before + space + ones[last]
    if noun.endswith("ies"):
        return noun[:-3] + "y"
    if re.search(r"(ss|x|z|ch|sh|us)es$", noun):
        return noun[:-2]
    return noun[:-1] if re.search(r"[^sui]s$", noun) else noun
