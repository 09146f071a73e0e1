"""A module of a program: variables that its functions change, and other modules."""

number, items = 0, []


class Settings:
    total = 0


def advance():
    global number
    number += 1
    items.append(number)
    Settings.total += 1
