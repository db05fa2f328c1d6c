//! The rows of one table out of a MySQL dump: `CREATE TABLE` for the columns' order, `INSERT … VALUES` with or without columns.
//!
//! Reads tokens, not SQL: what it does not know it skips to the next `;` outside of texts.

use std::collections::BTreeMap;

/// A row: its values by column. What is NULL is not there.
pub(super) type Row = BTreeMap<String, String>;

#[derive(Clone, Debug, PartialEq)]
enum Token {
    /// A name or a keyword, without its backticks; whether it had some.
    Word(String, bool),
    Text(String),
    Number(String),
    Mark(char),
}

/// The rows of a table.
///
/// # Errors
/// The line and what could not be read there, or that there is no such table.
pub(super) fn rows(dump: &str, table: &str) -> Result<Vec<Row>, String> {
    let mut reader = Reader { rest: dump, line: 1, table, columns: Vec::new(), rows: Vec::new(), seen: false };
    while let Some(statement) = reader.statement()? {
        reader.take(&statement)?;
    }
    if !reader.seen {
        return Err(format!("there is no table {table} in it; make the dump with: mysqldump DATABASE {table}"));
    }
    Ok(reader.rows)
}

/// A statement's tokens, each with its line.
type Statement = Vec<(usize, Token)>;

struct Reader<'d> {
    rest: &'d str,
    line: usize,
    table: &'d str,
    columns: Vec<String>,
    rows: Vec<Row>,
    seen: bool,
}

impl<'d> Reader<'d> {
    fn skip(&mut self, bytes: usize) -> &'d str {
        let (taken, rest) = self.rest.split_at(bytes.min(self.rest.len()));
        self.line += taken.bytes().filter(|b| *b == b'\n').count();
        self.rest = rest;
        taken
    }

    /// The next statement, without its `;`. Of statements about other tables only the first few words are kept.
    fn statement(&mut self) -> Result<Option<Statement>, String> {
        let mut tokens = Statement::new();
        while let Some((line, token)) = self.token()? {
            if token == Token::Mark(';') {
                if tokens.is_empty() {
                    continue;
                }
                return Ok(Some(tokens));
            }
            // INSERT INTO `a`.`b`, CREATE TABLE IF NOT EXISTS `a`.`b`: the table is named by then.
            if tokens.len() < 9 || self.is_ours(&tokens) {
                tokens.push((line, token));
            }
        }
        Ok((!tokens.is_empty()).then_some(tokens))
    }

    fn is_ours(&self, tokens: &Statement) -> bool {
        tokens.iter().take(9).any(|(_, token)| matches!(token, Token::Word(word, _) if word == self.table))
    }

    fn token(&mut self) -> Result<Option<(usize, Token)>, String> {
        loop {
            let blanks = self.rest.len() - self.rest.trim_start().len();
            self.skip(blanks);
            if self.rest.starts_with("--") || self.rest.starts_with('#') {
                let end = self.rest.find('\n').unwrap_or(self.rest.len());
                self.skip(end);
            } else if self.rest.starts_with("/*") {
                // What stands in /*! … */ are settings, none of which change what a row is.
                let end = self.rest.find("*/").map_or(self.rest.len(), |at| at + 2);
                self.skip(end);
            } else {
                break;
            }
        }
        let line = self.line;
        let Some(first) = self.rest.chars().next() else { return Ok(None) };
        let token = match first {
            '\'' | '"' => Token::Text(self.text(first)?),
            '`' => {
                let end = self.rest[1..].find('`').ok_or_else(|| format!("line {line}: a ` that does not end"))?;
                let name = self.skip(end + 2);
                Token::Word(name.trim_matches('`').to_lowercase(), true)
            }
            c if c.is_ascii_digit() || (c == '-' && self.rest[1..].starts_with(|d: char| d.is_ascii_digit())) => {
                let end = self.rest[1..]
                    .find(|c: char| !(c.is_ascii_alphanumeric() || c == '.'))
                    .map_or(self.rest.len(), |e| e + 1);
                Token::Number(self.skip(end).to_owned())
            }
            c if c.is_alphabetic() || c == '_' || c == '@' => {
                let end = self
                    .rest
                    .find(|c: char| !(c.is_alphanumeric() || matches!(c, '_' | '@' | '$')))
                    .unwrap_or(self.rest.len());
                Token::Word(self.skip(end).to_lowercase(), false)
            }
            c => {
                self.skip(c.len_utf8());
                Token::Mark(c)
            }
        };
        Ok(Some((line, token)))
    }

    /// A text in quotes: `\` escapes as MySQL has them, and a doubled quote.
    fn text(&mut self, quote: char) -> Result<String, String> {
        let begin = self.line;
        let mut text = String::new();
        let mut chars = self.rest.char_indices().skip(1);
        while let Some((at, c)) = chars.next() {
            match c {
                '\\' => match chars.next() {
                    Some((_, 'n')) => text.push('\n'),
                    Some((_, 't')) => text.push('\t'),
                    Some((_, 'r')) => text.push('\r'),
                    Some((_, '0')) => text.push('\0'),
                    Some((_, 'b')) => text.push('\u{8}'),
                    Some((_, 'Z')) => text.push('\u{1a}'),
                    Some((_, other)) => text.push(other),
                    None => break,
                },
                c if c == quote => {
                    if self.rest[at + 1..].starts_with(quote) {
                        text.push(quote);
                        chars.next();
                    } else {
                        self.skip(at + 1);
                        return Ok(text);
                    }
                }
                c => text.push(c),
            }
        }
        Err(format!("line {begin}: a text that does not end; was the dump cut off?"))
    }

    fn take(&mut self, tokens: &Statement) -> Result<(), String> {
        if !self.is_ours(tokens) {
            return Ok(());
        }
        let word = |at: usize| match tokens.get(at) {
            Some((_, Token::Word(word, false))) => word.as_str(),
            _ => "",
        };
        match (word(0), word(1)) {
            ("create", "table") => {
                self.seen = true;
                self.columns = columns_of(tokens);
                Ok(())
            }
            ("insert" | "replace", _) => self.insert(tokens),
            _ => Ok(()),
        }
    }

    fn insert(&mut self, tokens: &Statement) -> Result<(), String> {
        self.seen = true;
        let line = tokens.first().map_or(self.line, |(line, _)| *line);
        let is = |token: &Token, wanted: &str| matches!(token, Token::Word(word, false) if word == wanted);
        let Some(values) = tokens.iter().position(|(_, t)| is(t, "values") || is(t, "value")) else {
            return Err(format!("line {line}: an INSERT without VALUES"));
        };
        let named = list(&tokens[..values]);
        let columns = if named.is_empty() { self.columns.clone() } else { named };
        if columns.is_empty() {
            return Err(format!("line {line}: neither this INSERT nor a CREATE TABLE before it names the columns"));
        }
        let (mut row, mut depth) = (Vec::new(), 0);
        for (line, token) in &tokens[values + 1..] {
            match token {
                Token::Mark('(') if depth == 0 => (depth, row) = (1, Vec::new()),
                Token::Mark(')') if depth == 1 => {
                    depth = 0;
                    self.keep(&columns, std::mem::take(&mut row), *line)?;
                }
                Token::Mark(',') => {}
                // The character set before a text.
                Token::Word(word, false) if word.starts_with('_') => {}
                Token::Word(word, false) if word == "null" && depth == 1 => row.push(None),
                Token::Text(text) | Token::Number(text) if depth == 1 => row.push(Some(text.clone())),
                // ON DUPLICATE KEY UPDATE and the like.
                Token::Word(..) if depth == 0 => break,
                other => return Err(format!("line {line}: {other:?} is no value that this reader knows")),
            }
        }
        Ok(())
    }

    fn keep(&mut self, columns: &[String], values: Vec<Option<String>>, line: usize) -> Result<(), String> {
        if values.len() != columns.len() {
            return Err(format!("line {line}: a row of {} values for {} columns", values.len(), columns.len()));
        }
        let pairs = columns.iter().cloned().zip(values);
        self.rows.push(pairs.filter_map(|(column, value)| Some((column, value?))).collect());
        Ok(())
    }
}

/// The names in the first brackets, if there are some.
fn list(tokens: &[(usize, Token)]) -> Vec<String> {
    let inner = tokens.iter().skip_while(|(_, t)| *t != Token::Mark('(')).skip(1);
    let names = inner.take_while(|(_, t)| *t != Token::Mark(')'));
    names.filter_map(|(_, t)| if let Token::Word(name, _) = t { Some(name.clone()) } else { None }).collect()
}

/// The columns of a CREATE TABLE: what stands first behind its bracket and behind each comma of the same depth, unless it is a key.
fn columns_of(tokens: &Statement) -> Vec<String> {
    let (mut columns, mut depth, mut first) = (Vec::new(), 0, false);
    for (_, token) in tokens {
        match token {
            Token::Mark('(') => {
                depth += 1;
                first = depth == 1;
                continue;
            }
            Token::Mark(')') => depth -= 1,
            Token::Mark(',') if depth == 1 => {
                first = true;
                continue;
            }
            Token::Word(name, ticked) if depth == 1 && first => {
                let keyword = ["primary", "key", "unique", "index", "constraint", "fulltext", "foreign", "check"];
                if *ticked || !keyword.contains(&name.as_str()) {
                    columns.push(name.clone());
                }
            }
            _ => {}
        }
        first = false;
    }
    columns
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_read_by_the_order_of_the_columns() {
        let dump = r"
-- a dump; with ' in a comment
/*!40101 SET NAMES utf8mb4 */;
CREATE TABLE IF NOT EXISTS `db`.`t` (
  `id` int(11) NOT NULL AUTO_INCREMENT COMMENT 'it''s, (a) key',
  `name` varchar(50) DEFAULT 'x,y',
  price decimal(10,2),
  PRIMARY KEY (`id`), KEY `by_name` (`name`)
) ENGINE=InnoDB COMMENT='the; table';
INSERT INTO `other` VALUES (1,'INSERT INTO `t` VALUES (9)');
INSERT INTO `t` VALUES (1,'a\'b\\\n;\Z',-1.50),(2,NULL,0x1F);
INSERT IGNORE INTO t (name, id) VALUES (_utf8mb4'it''s é', 3) ON DUPLICATE KEY UPDATE name = VALUES(name);
REPLACE INTO `db`.`t` (`id`) VALUES
 (4);";
        let rows = rows(dump, "t").unwrap();
        let get = |n: usize, column: &str| rows[n].get(column).map(String::as_str);
        assert_eq!(rows.len(), 4, "{rows:?}");
        assert_eq!((get(0, "id"), get(0, "name"), get(0, "price")), (Some("1"), Some("a'b\\\n;\u{1a}"), Some("-1.50")));
        assert_eq!((get(1, "name"), get(1, "price")), (None, Some("0x1F")));
        assert_eq!((get(2, "id"), get(2, "name")), (Some("3"), Some("it's é")));
        assert_eq!(get(3, "id"), Some("4"));
    }

    #[test]
    fn faults_name_the_line() {
        for (dump, words) in [
            ("", "no table t"),
            ("SELECT 1;", "mysqldump DATABASE t"),
            ("\n\nINSERT INTO t VALUES (1);", "line 3"),
            ("INSERT INTO t (a) VALUES (1,2);", "2 values for 1 columns"),
            ("INSERT INTO t (a)\nVALUES (NOW());", "line 2"),
            ("INSERT INTO t (a) VALUES ('it", "cut off"),
            ("INSERT INTO t (a) SELECT 1;", "without VALUES"),
        ] {
            let why = rows(dump, "t").expect_err(dump);
            assert!(why.contains(words), "{dump}: {why}");
        }
    }
}
