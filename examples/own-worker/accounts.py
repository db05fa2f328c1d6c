import sqlite3

ledger = sqlite3.connect("shardcron.db", timeout=30)
with ledger:
    ledger.execute("CREATE TABLE IF NOT EXISTS accounts (id INTEGER PRIMARY KEY, settled INTEGER NOT NULL)")
    ledger.executemany("INSERT OR IGNORE INTO accounts VALUES (?, 0)", ((number,) for number in range(1, 100001)))
