//! What a job file may say of its shards, and what is said to who wrote something else: line, key, and what would be right.
#![allow(clippy::unwrap_used, missing_docs, reason = "tests")]

use shardcron_domain::jobfile::{self, parse};
use shardcron_domain::plan::ShardPlan;

fn job(shards: &str) -> String {
    format!("[job.j]\nhandler = {{ rust = \"noop\" }}\n\n[job.j.shards]\n{shards}\n")
}

#[test]
fn every_kind_of_shards_is_read() {
    for (shards, count) in [
        ("slots = 8", 8),
        ("broadcast = true", 0),
        ("file = { path = \"/in.csv\", count = 4, format = \"csv\", header = true }", 0),
        ("file = { glob = \"/in/*.txt\", size = 1000 }", 0),
        ("query = { table = \"shop.orders\", key = \"id\", where = \"paid = 0\", count = 4 }", 0),
        ("map = { reduce = true }", 1),
        ("map = {}", 1),
        ("slots = 8\nbalance = \"last\"", 8),
        ("list = [\"a\", \"b\"]\ncount = 16\nbalance = \"last\"\nsplit = true", 2),
        ("range = { from = 1, to = 9 }\ncount = 3\nbalance = \"last\"", 3),
    ] {
        let spec = parse(&job(shards)).unwrap_or_else(|e| panic!("{shards}: {e}")).remove(0);
        let plan = ShardPlan::from_spec(&spec.shards).unwrap();
        assert_eq!(plan.count(), count, "{shards}");
        let again: shardcron_domain::JobSpec = serde_json::from_str(&spec.canonical_json()).unwrap();
        assert_eq!(again, spec, "what the ledger keeps is what was read");
    }
}

#[test]
fn what_is_wrong_is_said_with_its_line_and_key() {
    for (shards, line, words) in [
        ("slots = 8\nmodulo = 2", 4, "modulo and slots are there; only one of"),
        ("slots = 0", 5, "shards.slots: 0 shards"),
        ("slots = 1025", 5, "there are 1024 slots"),
        ("count = 3\nslots = 8", 5, "shards.count: slots already says"),
        ("broadcast = true\ncount = 3", 6, "one shard for each live worker"),
        ("file = { path = \"in.csv\" }", 5, "does not begin with '/'"),
        ("file = { path = \"/a\", glob = \"/b\" }", 5, "not both"),
        ("file = { path = \"/a\", delimiter = \";\" }", 5, "only rows of CSV have fields"),
        ("file = { path = \"/a\", format = \"csv\", delimiter = \"\\\"\" }", 5, "can't stand between fields"),
        ("file = {}", 5, "which file?"),
        ("file = { path = \"/a\", count = 2, size = 3 }", 5, "shards.file.size: give count or size"),
        ("file = { path = \"/a\" }\ncount = 2", 6, "put count into the file"),
        ("file = { path = \"/a\", format = \"xml\" }", 5, "unknown variant `xml`, expected `lines` or `csv`"),
        ("file = { path = \"/a\", lines = true }", 5, "unknown field `lines`"),
        ("query = { table = \"t; DROP\", key = \"id\", count = 2 }", 5, "shards.query.table: 't; DROP' is no table"),
        ("query = { table = \"t\", key = \"a b\", count = 2 }", 5, "shards.query.key: 'a b' is no column"),
        ("query = { table = \"t\", key = \"id\", count = 0 }", 5, "shards.query.count: 0 shards"),
        ("query = { table = \"t\", key = \"id\" }", 5, "missing field `count`"),
        ("query = { table = \"t\", key = \"id\", where = \"a = :b\", count = 2 }", 5, "without parameters"),
        ("map = { max = 0 }", 5, "shards.map.max: 0 emitted shards"),
        ("modulo = 4\nbalance = \"last\"", 6, "shards.balance: \"last\" moves the cuts"),
        ("range = { from = 1, to = 9 }\nbalance = \"first\"", 6, "unknown variant `first`, expected `last`"),
        ("list = [\"a\"]\nsplit = true", 6, "shards.split: 'split' lets balance"),
        ("size = 5", 5, "shards.size: 'size' belongs to a range"),
    ] {
        let file = jobfile::read(&job(shards), &|_| Err("none".into()));
        let fault = file.faults.first().unwrap_or_else(|| panic!("{shards} was taken"));
        assert!(fault.message.contains(words), "{shards}: {fault}");
        assert_eq!(fault.line, line, "{shards}: {fault}");
    }
}

#[test]
fn shards_and_handlers_that_do_not_fit() {
    for (shards, words) in [
        ("{ map = {} }", "shards.map: the first shard emits the others, which an sql handler can't"),
        ("{ file = { path = \"/a\" } }", "shards.file: an sql handler reads tables"),
    ] {
        let text = format!("[job.j]\nshards = {shards}\nhandler = {{ sql = \"SELECT 1\" }}\n");
        let fault = parse(&text).unwrap_err();
        assert!(fault.line == 2 && fault.message.contains(words), "{fault}");
    }
    let chunked = |shards: &str| {
        parse(&format!("[job.j]\nshards = {shards}\nhandler = {{ sql = \"SELECT :shard_from\", chunk = 10 }}\n"))
    };
    assert!(chunked("{ query = { table = \"t\", key = \"id\", count = 2 } }").is_ok());
    assert!(chunked("{ slots = 2 }").unwrap_err().message.contains("chunks are cut from a range"));
}
