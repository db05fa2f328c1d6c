//! Owns the services that many tests share: one set per run, or one per test process.
//!
//! `testkit run` starts a set and names it in `SHARDCRON_TEST_*_URL`; without those variables, each service is started
//! in this process when it is first asked for. Statics are not dropped at exit: the watchdog of `process` ends them.

use std::sync::OnceLock;

use anyhow::{Context, Result};

use crate::management::Management;
use crate::sql::{execute_at, with_database};
use crate::{RabbitMq, Redis, Sql, unique_prefix};

/// Names the AMQP URL of a RabbitMQ to use.
pub const AMQP_URL: &str = "SHARDCRON_TEST_AMQP_URL";
/// Names the URL (with user and password) of that RabbitMQ's management API.
pub const MANAGEMENT_URL: &str = "SHARDCRON_TEST_MANAGEMENT_URL";
/// Names the URL of a Redis to use.
pub const REDIS_URL: &str = "SHARDCRON_TEST_REDIS_URL";
/// Names the URL of a MariaDB or MySQL to use; its user must be allowed to create databases.
pub const SQL_URL: &str = "SHARDCRON_TEST_SQL_URL";

/// The shared services. A test keeps to its own corner of them: a fresh database, vhost or prefix. It must not kill,
/// freeze or flush them; for that it starts its own.
#[derive(Debug)]
pub struct Shared {
    rabbitmq: Lazy<(String, String), RabbitMq>,
    redis: Lazy<String, Redis>,
    sql: Lazy<String, Sql>,
}

/// What is known of a service, and the service itself if it is ours.
type Lazy<Known, Service> = OnceLock<(Known, Option<Service>)>;

/// The shared services of this process.
pub fn shared() -> &'static Shared {
    static SHARED: Shared = Shared { rabbitmq: OnceLock::new(), redis: OnceLock::new(), sql: OnceLock::new() };
    &SHARED
}

impl Shared {
    /// The AMQP URL of the default vhost.
    ///
    /// # Panics
    /// When RabbitMQ can't be started: no test that asks for it could go on.
    pub fn amqp_url(&self) -> &str {
        &self.rabbitmq().0
    }

    /// The management API, for the default vhost.
    ///
    /// # Panics
    /// When RabbitMQ can't be started.
    pub fn management(&self) -> Management {
        required("the management URL", Management::from_url(&self.rabbitmq().1))
    }

    /// The URL of Redis.
    ///
    /// # Panics
    /// When Redis can't be started.
    pub fn redis_url(&self) -> &str {
        let start = || Redis::start().map(|redis| (redis.url(), Some(redis)));
        let known = self.redis.get_or_init(|| match from_env(REDIS_URL) {
            Some(url) => (url, None),
            None => required("Redis", start()),
        });
        &known.0
    }

    /// The URL of MariaDB or MySQL.
    ///
    /// # Panics
    /// When it can't be started.
    pub fn sql_url(&self) -> &str {
        let start = || Sql::start().map(|sql| (sql.url(), Some(sql)));
        let known = self.sql.get_or_init(|| match from_env(SQL_URL) {
            Some(url) => (url, None),
            None => required("the SQL server", start()),
        });
        &known.0
    }

    /// Makes an empty database; gives its URL.
    ///
    /// # Panics
    /// When the server can't be started or refuses.
    pub fn fresh_database(&self) -> String {
        let name = unique_prefix();
        let url = self.sql_url();
        let made = execute_at(url, &format!("CREATE DATABASE `{name}` CHARACTER SET utf8mb4"));
        required("a fresh database", made.and_then(|_| with_database(url, &name)))
    }

    /// Makes an empty vhost; gives the AMQP URL for it. [`vhost_of`] gives its name back.
    ///
    /// # Panics
    /// When RabbitMQ can't be started or refuses.
    pub fn fresh_vhost(&self) -> String {
        let name = unique_prefix();
        required("a fresh vhost", self.management().create_vhost(&name));
        let url = self.amqp_url();
        let base = url.rsplit_once('/').filter(|(before, _)| !before.ends_with('/')).map_or(url, |(before, _)| before);
        format!("{base}/{name}")
    }

    /// The management API, for the vhost that an AMQP URL names.
    ///
    /// # Panics
    /// When RabbitMQ can't be started.
    pub fn management_of(&self, amqp_url: &str) -> Management {
        self.management().with_vhost(&vhost_of(amqp_url))
    }

    /// A prefix for Redis keys that no other test has.
    pub fn fresh_redis_prefix(&self) -> String {
        unique_prefix()
    }

    fn rabbitmq(&self) -> &(String, String) {
        let start =
            || RabbitMq::start().map(|rabbit| ((rabbit.amqp_url(), rabbit.management_url_with_login()), Some(rabbit)));
        let known = self.rabbitmq.get_or_init(|| match (from_env(AMQP_URL), from_env(MANAGEMENT_URL)) {
            (Some(amqp), Some(management)) => ((amqp, management), None),
            (None, None) => required("RabbitMQ", start()),
            _ => panic!("set both {AMQP_URL} and {MANAGEMENT_URL}, or neither"),
        });
        &known.0
    }
}

/// The vhost that an AMQP URL names.
pub fn vhost_of(amqp_url: &str) -> String {
    let rest = amqp_url.split_once("://").map_or(amqp_url, |(_, rest)| rest);
    match rest.split_once('/') {
        Some((_, path)) => crate::management::decode(path.split('?').next().unwrap_or_default()),
        None => "/".to_owned(),
    }
}

fn from_env(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

fn required<T>(what: &str, result: Result<T>) -> T {
    match result.with_context(|| format!("the test needs {what}")) {
        Ok(value) => value,
        Err(error) => panic!("{error:#}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_vhost_of_a_url() {
        assert_eq!(vhost_of("amqp://a:b@127.0.0.1:1/%2f"), "/");
        assert_eq!(vhost_of("amqp://a:b@127.0.0.1:1"), "/");
        assert_eq!(vhost_of("amqp://a:b@127.0.0.1:1/t1?heartbeat=5"), "t1");
    }
}
