//! Reads a job's SQL: finds where statements end and where parameters stand, and nothing else.
//!
//! The same job file runs on MySQL, MariaDB and SQLite, whose lexers differ in a few places. Where they would read the text
//! differently (a backslash before a quote, `--` without a blank), guessing could bind a parameter inside a string or run half
//! a comment, so such a text is refused with the spelling that both read the same way.

/// Statements with named parameters, read once and bound for each step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SqlTemplate {
    pub(crate) statements: Vec<Statement>,
}

/// One statement: `?` where a parameter stood, and the parameters' names in that order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Statement {
    pub(crate) text: String,
    pub(crate) names: Vec<String>,
}

/// First words of statements that end a transaction, in MySQL silently. Behind one of them the fence would be gone: a shard
/// taken from this worker could still be written by it.
const ENDS_TRANSACTION: [&str; 29] = [
    "ALTER",
    "ANALYZE",
    "ATTACH",
    "BEGIN",
    "CHANGE",
    "COMMIT",
    "CREATE",
    "DETACH",
    "DROP",
    "END",
    "FLUSH",
    "GRANT",
    "INSTALL",
    "LOCK",
    "OPTIMIZE",
    "PRAGMA",
    "RELEASE",
    "RENAME",
    "REPAIR",
    "RESET",
    "REVOKE",
    "ROLLBACK",
    "SAVEPOINT",
    "START",
    "STOP",
    "TRUNCATE",
    "UNLOCK",
    "VACUUM",
    "XA",
];

impl SqlTemplate {
    /// Reads a text of statements separated by `;`.
    ///
    /// # Errors
    /// A sentence: an open quote or comment, a spelling that databases read differently, a bare `?`, a statement that would end
    /// the shard's transaction, or no statement at all.
    pub fn parse(sql: &str) -> Result<Self, String> {
        if sql.contains('\0') {
            return Err("the sql contains a NUL character".into());
        }
        let mut reader =
            Reader { rest: sql, out: Statement { text: String::new(), names: Vec::new() }, done: Vec::new() };
        while let Some(c) = reader.peek() {
            reader.step(c)?;
        }
        reader.close()?;
        if reader.done.is_empty() {
            return Err("the sql of the handler has no statement".into());
        }
        Ok(SqlTemplate { statements: reader.done })
    }
}

struct Reader<'a> {
    rest: &'a str,
    out: Statement,
    done: Vec<Statement>,
}

impl<'a> Reader<'a> {
    fn peek(&self) -> Option<char> {
        self.rest.chars().next()
    }

    /// Takes `bytes` of the text, which must end at a character.
    fn take(&mut self, bytes: usize) -> &'a str {
        let (head, tail) = self.rest.split_at(bytes);
        self.rest = tail;
        head
    }

    fn copy(&mut self, bytes: usize) {
        let head = self.take(bytes);
        self.out.text.push_str(head);
    }

    fn step(&mut self, c: char) -> Result<(), String> {
        match c {
            '\'' | '"' => self.quoted(c),
            '`' => self.backticks(),
            '-' if self.rest.starts_with("--") => self.dashes(),
            '#' => {
                self.drop_line();
                Ok(())
            }
            '/' if self.rest.starts_with("/*") => self.block_comment(),
            '?' => {
                Err("a bare '?' names no parameter; write :shard_from, :shard_to or the name of one of the job's"
                    .into())
            }
            ':' => {
                self.parameter();
                Ok(())
            }
            ';' => {
                self.take(1);
                self.close()
            }
            other if is_name(other) => {
                self.copy(name_length(self.rest));
                Ok(())
            }
            other => {
                self.copy(other.len_utf8());
                Ok(())
            }
        }
    }

    /// A text in quotes. A doubled quote stands for itself in all databases; a backslash before one only in MySQL.
    fn quoted(&mut self, quote: char) -> Result<(), String> {
        let mut backslashes = 0usize;
        let mut characters = self.rest.char_indices().skip(1).peekable();
        while let Some((at, c)) = characters.next() {
            if c == '\\' {
                backslashes += 1;
                continue;
            }
            if c == quote {
                if backslashes % 2 == 1 {
                    return Err(format!(
                        "a backslash stands before a {quote} in a text, which MySQL and SQLite read differently; double the quote \
                         ({quote}{quote}) instead"
                    ));
                }
                if characters.peek().is_some_and(|(_, next)| *next == quote) {
                    characters.next();
                } else {
                    self.copy(at + 1);
                    return Ok(());
                }
            }
            backslashes = 0;
        }
        Err(format!("a text that begins with {quote} never ends: {}", excerpt(self.rest)))
    }

    fn backticks(&mut self) -> Result<(), String> {
        match self.rest[1..].find('`') {
            Some(length) => {
                self.copy(length + 2);
                Ok(())
            }
            None => Err(format!("a name in backticks never ends: {}", excerpt(self.rest))),
        }
    }

    fn dashes(&mut self) -> Result<(), String> {
        match self.rest[2..].chars().next() {
            None => self.drop_line(),
            Some(next) if next.is_ascii_whitespace() => self.drop_line(),
            Some(_) => {
                return Err("'--' without a blank after it is a comment in SQLite and two minus signs in MySQL; write '-- ' for \
                            a comment or '- -' for the signs"
                    .into());
            }
        }
        Ok(())
    }

    /// Comments leave the text: what is sent must not contain a `?` that is not a placeholder. The line's end stays.
    fn drop_line(&mut self) {
        let length = self.rest.find('\n').unwrap_or(self.rest.len());
        self.take(length);
    }

    fn block_comment(&mut self) -> Result<(), String> {
        let Some(length) = self.rest[2..].find("*/") else {
            return Err(format!("a comment never ends: {}", excerpt(self.rest)));
        };
        let comment = self.take(length + 4);
        match comment.as_bytes().get(2) {
            // MySQL runs what stands in here, and SQLite does not.
            Some(b'!') => Err("/*! … */ is code in MySQL and a comment in SQLite; write it plainly".into()),
            // A hint for MySQL's optimizer; only there if it can't be taken for more.
            Some(b'+') if !comment.contains(['?', ':', ';']) => {
                self.out.text.push_str(comment);
                Ok(())
            }
            _ => {
                self.out.text.push(' ');
                Ok(())
            }
        }
    }

    /// `:name` is a parameter; `:=`, `::` and a colon before anything else stay as they are.
    fn parameter(&mut self) {
        let after = &self.rest[1..];
        if after.starts_with(':') {
            self.copy(2);
            return;
        }
        match after.chars().next() {
            Some(c) if c.is_ascii_alphabetic() || c == '_' => {
                self.take(1);
                let length = after.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(after.len());
                let name = self.take(length).to_owned();
                self.out.names.push(name);
                self.out.text.push('?');
            }
            _ => self.copy(1),
        }
    }

    fn close(&mut self) -> Result<(), String> {
        let statement = std::mem::replace(&mut self.out, Statement { text: String::new(), names: Vec::new() });
        let text = statement.text.trim();
        if text.is_empty() {
            return Ok(());
        }
        check_first_words(text)?;
        self.done.push(Statement { text: text.to_owned(), names: statement.names });
        Ok(())
    }
}

fn check_first_words(text: &str) -> Result<(), String> {
    let mut words = text.split(|c: char| !is_name(c)).filter(|w| !w.is_empty()).map(str::to_ascii_uppercase);
    let (first, second) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let temporary = matches!(first.as_str(), "CREATE" | "DROP") && matches!(second.as_str(), "TEMPORARY" | "TEMP");
    let autocommit = first == "SET" && text.to_ascii_uppercase().contains("AUTOCOMMIT");
    if (ENDS_TRANSACTION.contains(&first.as_str()) && !temporary) || autocommit {
        return Err(format!(
            "{first} would end the transaction that the shard's result is recorded in; do that outside of the job (tables once, \
             before it runs), and leave BEGIN and COMMIT to Shardcron"
        ));
    }
    Ok(())
}

/// What a word of SQL is made of. A colon behind one of these still begins a parameter: `LIMIT:n` is read so by both databases.
fn is_name(c: char) -> bool {
    c.is_alphanumeric() || c == '_' || c == '$'
}

fn name_length(text: &str) -> usize {
    text.find(|c| !is_name(c)).unwrap_or(text.len())
}

fn excerpt(text: &str) -> String {
    let short: String = text.chars().take(40).collect();
    if short.len() < text.len() { format!("{short}…") } else { short }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(sql: &str) -> Vec<(String, Vec<String>)> {
        SqlTemplate::parse(sql).unwrap().statements.into_iter().map(|s| (s.text, s.names)).collect()
    }

    fn one(sql: &str) -> (String, Vec<String>) {
        let all = parse(sql);
        assert_eq!(all.len(), 1, "{all:?}");
        all.into_iter().next().unwrap()
    }

    #[test]
    fn parameters_become_placeholders_in_order() {
        let (text, names) = one("UPDATE t SET a=:date WHERE id BETWEEN :shard_from AND :shard_to OR x=:date;");
        assert_eq!(text, "UPDATE t SET a=? WHERE id BETWEEN ? AND ? OR x=?");
        assert_eq!(names, ["date", "shard_from", "shard_to", "date"]);
    }

    #[test]
    fn quotes_names_and_comments_hide_what_is_in_them() {
        for sql in [
            "SELECT ':a; ? -- x'",
            "SELECT 'it''s :a;'",
            "SELECT \":a;?\"",
            "SELECT `:a;?`",
            "SELECT 'ends in two backslashes \\\\'",
            "SELECT @v := 1",
            "SELECT a::b",
        ] {
            assert_eq!(one(sql), (sql.to_owned(), vec![]), "{sql}");
        }
        assert_eq!(one("SELECT 1 -- :a; ?\n+ 2").0, "SELECT 1 \n+ 2");
        assert_eq!(one("SELECT 1 # :a; ?\n+ 2").0, "SELECT 1 \n+ 2");
        assert_eq!(one("SELECT/* :a; ? */1").0, "SELECT 1");
        assert_eq!(one("SELECT /*+ MAX_EXECUTION_TIME(1000) */ 1").0, "SELECT /*+ MAX_EXECUTION_TIME(1000) */ 1");
    }

    #[test]
    fn statements_are_split_and_empty_ones_dropped() {
        let all = parse(";; DELETE FROM a WHERE id=:id ; -- only a comment\n; INSERT INTO b VALUES (';') ;\n");
        assert_eq!(all.len(), 2);
        assert_eq!(all[0], ("DELETE FROM a WHERE id=?".into(), vec!["id".into()]));
        assert_eq!(all[1], ("INSERT INTO b VALUES (';')".into(), vec![]));
    }

    #[test]
    fn z_03_what_databases_read_differently_is_refused_with_the_right_spelling() {
        for (sql, hint) in [
            ("SELECT 'it\\'s', :a", "double the quote"),
            ("SELECT 1--:a", "blank"),
            ("SELECT /*! :a */ 1", "plainly"),
            ("SELECT 'open", "never ends"),
            ("SELECT `open", "never ends"),
            ("SELECT /* open", "never ends"),
            ("SELECT ?", "names no parameter"),
            (" ; -- nothing", "no statement"),
            ("SELECT '\0'", "NUL"),
        ] {
            let error = SqlTemplate::parse(sql).unwrap_err();
            assert!(error.contains(hint), "{sql}: {error}");
        }
    }

    #[test]
    fn what_would_end_the_transaction_is_refused() {
        for sql in
            ["COMMIT", "begin; DELETE FROM a", "/* x */ create table t (a int)", "SET autocommit=1", "(TRUNCATE t)"]
        {
            assert!(SqlTemplate::parse(sql).unwrap_err().contains("transaction"), "{sql}");
        }
        one("CREATE TEMPORARY TABLE t (a INT)");
        one("REPLACE INTO t VALUES (1)");
        one("SET @a = 1");
    }

    fn piece() -> impl Strategy<Value = (String, Option<&'static str>)> {
        prop_oneof![
            "[a-z0-9 ,()=<>+*]{1,8}".prop_map(|t| (t, None)),
            "'([a-z;:? #-]|''){0,8}'".prop_map(|t| (t, None)),
            "\"([a-z;:?# -]|\"\"){0,8}\"".prop_map(|t| (t, None)),
            "`[a-z;:? '-]{0,8}`".prop_map(|t| (t, None)),
            Just((":alpha".to_owned(), Some("alpha"))),
            Just((":beta_2".to_owned(), Some("beta_2"))),
        ]
    }

    proptest! {
        /// Whatever stands in quotes never becomes a parameter or the end of a statement; every parameter outside does.
        #[test]
        fn only_what_stands_outside_of_quotes_counts(pieces in proptest::collection::vec(piece(), 1..20)) {
            let sql = format!("SELECT {}", pieces.iter().map(|(t, _)| t.as_str()).collect::<Vec<_>>().join(" "));
            let template = SqlTemplate::parse(&sql).unwrap();
            prop_assert_eq!(template.statements.len(), 1);
            let expected: Vec<&str> = pieces.iter().filter_map(|(_, name)| *name).collect();
            prop_assert_eq!(&template.statements[0].names, &expected);
            let quoted: usize = pieces.iter().map(|(t, _)| t.matches('?').count()).sum();
            prop_assert_eq!(template.statements[0].text.matches('?').count(), expected.len() + quoted);
        }

        /// Nothing makes it panic, and what it gives out has as many placeholders outside of quotes as names.
        #[test]
        fn any_text_is_read_or_refused(sql in "\\PC{0,60}") {
            if let Ok(template) = SqlTemplate::parse(&sql) {
                for statement in template.statements {
                    prop_assert!(!statement.text.trim().is_empty());
                    if statement.names.is_empty() && !statement.text.contains(':') {
                        prop_assert!(SqlTemplate::parse(&statement.text).is_ok() || statement.text.contains('?'));
                    }
                }
            }
        }
    }
}
