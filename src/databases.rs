//! Other databases of a worker: by URL, or by where the URL is kept, so that the configuration file holds no password.

use anyhow::{Context as _, Result, bail};
use serde::Deserialize;
use shardcron_domain::address::masked;
use std::collections::BTreeMap;
use std::io::Read as _;

const SCHEMES: [&str; 3] = ["mysql://", "mariadb://", "sqlite:"];
/// The URL's file at most. One that is larger is another file.
const FILE_BYTES: u64 = 4_096;

/// Names, and for each a URL, `env:NAME` (a variable that holds the URL) or `file:/path` (a file that holds it). URLs hold passwords, which
/// nobody is shown (case Z-05).
#[derive(Clone, Default, Deserialize)]
pub struct Databases(BTreeMap<String, String>);

impl std::fmt::Debug for Databases {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_map().entries(self.0.iter().map(|(name, value)| (name, masked(value)))).finish()
    }
}

impl Databases {
    /// Checks the spelling. Whether a variable or a file is there is asked by who needs it: a person's laptop has neither.
    pub(crate) fn check(&self) -> Result<()> {
        for (name, value) in &self.0 {
            shardcron_domain::job::check_name(name, 32).map_err(|e| anyhow::anyhow!("databases: {e}"))?;
            let known = match (value.strip_prefix("env:"), value.strip_prefix("file:")) {
                (Some(variable), _) => !variable.is_empty() && !variable.contains(['=', '\0']),
                (_, Some(path)) => path.starts_with('/'),
                (None, None) => is_url(value),
            };
            if !known {
                bail!(
                    "databases.{name}: a URL that begins with mysql:// or sqlite:// is needed, or where it is kept: env:NAME for a \
                     variable, file:/path for a file (with its whole path)"
                );
            }
        }
        Ok(())
    }

    /// The names.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    /// The URL of one: as it stands, or from its variable or its file.
    ///
    /// # Errors
    /// The variable or the file is missing or holds no URL: says which key and what to do, and quotes nothing of it.
    pub(crate) fn url(&self, name: &str, variable: impl Fn(&str) -> Option<String>) -> Result<String> {
        let value = self.0.get(name).with_context(|| format!("databases.{name} is not configured"))?;
        let (url, kept) = if let Some(from) = value.strip_prefix("env:") {
            let Some(url) = variable(from).filter(|text| !text.trim().is_empty()) else {
                bail!(
                    "databases.{name}: the variable {from} is not set; set it to the database's URL where this process is started"
                );
            };
            (url, format!("the variable {from}"))
        } else if let Some(path) = value.strip_prefix("file:") {
            let why = || {
                format!(
                    "databases.{name}: the file {path} can't be read; put the database's URL into it, readable for this user"
                )
            };
            let mut text = String::new();
            let file = std::fs::File::open(path).with_context(why)?;
            file.take(FILE_BYTES + 1).read_to_string(&mut text).with_context(why)?;
            if text.len() as u64 > FILE_BYTES {
                bail!(
                    "databases.{name}: the file {path} has more than {FILE_BYTES} bytes; it must hold the URL and nothing else"
                );
            }
            (text, format!("the file {path}"))
        } else {
            return Ok(value.clone());
        };
        let url = url.trim();
        if !is_url(url) || url.contains(char::is_whitespace) {
            bail!(
                "databases.{name}: {kept} holds no URL; it must be one that begins with mysql:// or sqlite://, and nothing else"
            );
        }
        Ok(url.to_owned())
    }

    /// All of them, each with its URL.
    ///
    /// # Errors
    /// See [`Databases::url`].
    pub(crate) fn urls(&self) -> Result<Vec<(String, String)>> {
        self.names().map(|name| Ok((name.to_owned(), self.url(name, |key| std::env::var(key).ok())?))).collect()
    }
}

fn is_url(text: &str) -> bool {
    SCHEMES.iter().any(|scheme| text.starts_with(scheme))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn databases(value: &str) -> Databases {
        Databases(BTreeMap::from([("orders".to_owned(), value.to_owned())]))
    }

    #[test]
    fn z_05_a_url_comes_from_a_variable_or_a_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("url");
        std::fs::write(&path, "mysql://app:hush@db:3306/orders\n").unwrap();
        let variables = |name: &str| (name == "ORDERS").then(|| "mysql://app:hush@db/orders".to_owned());
        let file = format!("file:{}", path.display());
        for (value, url) in [
            ("sqlite:///var/orders.db", "sqlite:///var/orders.db"),
            ("env:ORDERS", "mysql://app:hush@db/orders"),
            (file.as_str(), "mysql://app:hush@db:3306/orders"),
        ] {
            let databases = databases(value);
            databases.check().unwrap();
            assert_eq!(databases.url("orders", variables).unwrap(), url, "{value}");
            assert!(!format!("{databases:?}").contains("hush"));
        }
    }

    #[test]
    fn what_is_missing_is_named_and_nothing_is_quoted() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name).display().to_string();
        std::fs::write(path("words"), "the password is hush").unwrap();
        std::fs::write(path("large"), "mysql://".repeat(1_000)).unwrap();
        let variables = |name: &str| (name == "WORDS").then(|| "hush".to_owned());
        for (value, words) in [
            ("env:NOBODY".to_owned(), "the variable NOBODY is not set"),
            ("env:WORDS".to_owned(), "holds no URL"),
            (format!("file:{}", path("nothing")), "can't be read"),
            (format!("file:{}", path("words")), "holds no URL"),
            (format!("file:{}", path("large")), "more than 4096 bytes"),
        ] {
            let sentence = format!("{:#}", databases(&value).url("orders", variables).unwrap_err());
            assert!(sentence.contains("databases.orders") && sentence.contains(words), "{value}: {sentence}");
            assert!(!sentence.contains("hush"), "{sentence}");
        }
        for value in ["orders.db", "env:", "file:relative/path", "http://db"] {
            let sentence = databases(value).check().unwrap_err().to_string();
            // What stands there may be a password.
            assert!(sentence.contains("env:NAME") && !sentence.contains(&format!("'{value}'")), "{sentence}");
        }
    }
}
