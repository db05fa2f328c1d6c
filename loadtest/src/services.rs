//! The three services under test: private ones, or those that the command line names; then in a corner of their own (a fresh
//! database, a prefix of their own), which is taken away at the end.

use anyhow::{Context, Result, bail};
use clap::Args;
use lapin::options::{ExchangeDeleteOptions, QueueDeleteOptions};
use lapin::{Connection, ConnectionProperties};
use shardcron_broker::topology::Names;
use shardcron_store::sql::{SqlLedger, SqlOptions};
use testkit::{RabbitMq, Redis, Sql};

/// Services that run already. Each that is not named is started for the run.
#[derive(Args, Clone, Debug, Default)]
pub struct ServiceArgs {
    /// MariaDB or MySQL, whose user may create databases: mysql://user:password@127.0.0.1:3306/any
    #[arg(long, value_name = "URL")]
    pub sql_url: Option<String>,
    /// RabbitMQ: amqp://user:password@127.0.0.1:5672/%2f
    #[arg(long, value_name = "URL")]
    pub amqp_url: Option<String>,
    /// Redis: redis://127.0.0.1:6379
    #[arg(long, value_name = "URL")]
    pub redis_url: Option<String>,
}

/// What a run works on.
pub struct Services {
    /// For the ledger.
    pub sql_url: String,
    /// For the broker.
    pub amqp_url: String,
    /// For lease, presence and idempotency keys.
    pub redis_url: String,
    /// What all names in RabbitMQ and Redis begin with.
    pub prefix: String,
    /// MySQL or MariaDB, if it is ours.
    pub sql: Option<Sql>,
    /// RabbitMQ, if it is ours.
    pub rabbitmq: Option<RabbitMq>,
    /// Redis, if it is ours.
    pub redis: Option<Redis>,
    /// A database at a server that is not ours, and how to reach that server.
    borrowed: Option<(String, String)>,
    /// Databases that were made besides, at either.
    others: Vec<String>,
}

impl Services {
    /// Starts what is not named, and makes the corner.
    ///
    /// # Errors
    /// A server is missing or does not answer, or a URL is not of the loopback address.
    pub async fn start(args: ServiceArgs, tell: impl Fn(&str)) -> Result<Self> {
        let named = [("--sql-url", &args.sql_url), ("--amqp-url", &args.amqp_url), ("--redis-url", &args.redis_url)];
        for (flag, url) in named {
            if let Some(url) = url {
                check_loopback(url).context(flag)?;
            }
        }
        let prefix = format!("loadtest-{}", &uuid::Uuid::new_v4().simple().to_string()[..12]);
        tell("starting the database");
        let (sql, sql_url, borrowed) = match args.sql_url {
            None => {
                let sql = blocking(Sql::start).await?;
                let url = sql.url();
                (Some(sql), url, None)
            }
            Some(server) => {
                let database = prefix.replace('-', "_");
                let at = connect(&server).await?;
                at.execute_script(&format!("CREATE DATABASE {database} CHARACTER SET utf8mb4"))
                    .await
                    .context("a database for this run; its user has to be allowed to create one")?;
                (None, with_database(&server, &database), Some((server, database)))
            }
        };
        tell("starting Redis");
        let (redis, redis_url) = match args.redis_url {
            Some(url) => (None, url),
            None => {
                let redis = blocking(Redis::start).await?;
                let url = redis.url();
                (Some(redis), url)
            }
        };
        tell("starting RabbitMQ");
        let (rabbitmq, amqp_url) = match args.amqp_url {
            Some(url) => (None, url),
            None => {
                let rabbitmq = blocking(RabbitMq::start).await?;
                let url = rabbitmq.amqp_url();
                (Some(rabbitmq), url)
            }
        };
        Ok(Services { sql_url, amqp_url, redis_url, prefix, sql, rabbitmq, redis, borrowed, others: Vec::new() })
    }

    /// Makes another database at the same server; gives its name and its URL.
    ///
    /// # Errors
    /// The server refuses it.
    pub async fn another_database(&mut self, suffix: &str) -> Result<(String, String)> {
        let database = format!("{}_{suffix}", self.prefix.replace('-', "_"));
        let at = connect(&self.sql_url).await?;
        at.execute_script(&format!("CREATE DATABASE {database} CHARACTER SET utf8mb4"))
            .await
            .context("another database for this run; its user has to be allowed to create one")?;
        self.others.push(database.clone());
        let url = with_database(&self.sql_url, &database);
        Ok((database, url))
    }

    /// The processes that are ours, by the names of the report.
    pub fn pids(&self) -> Vec<(String, u32)> {
        let ours = [
            ("rabbitmq", self.rabbitmq.as_ref().map(RabbitMq::pid)),
            ("sql", self.sql.as_ref().map(Sql::pid)),
            ("redis", self.redis.as_ref().map(Redis::pid)),
        ];
        ours.into_iter().filter_map(|(name, pid)| Some((name.to_owned(), pid?))).collect()
    }

    /// Whether all three were started for this run, and so can be measured.
    pub fn all_ours(&self) -> bool {
        self.rabbitmq.is_some() && self.sql.is_some() && self.redis.is_some()
    }

    /// Takes away what was made at servers that go on; ours end with this value.
    ///
    /// # Errors
    /// A server no longer answers: what was made stays there.
    pub async fn clean_up(&self, tiers: &[String]) -> Result<()> {
        if let Some((server, database)) = &self.borrowed {
            let at = connect(server).await?;
            for database in self.others.iter().chain([database]) {
                at.execute_script(&format!("DROP DATABASE IF EXISTS {database}"))
                    .await
                    .context("dropping the run's databases")?;
            }
        }
        if self.rabbitmq.is_none() {
            self.delete_queues(tiers).await.context("deleting the run's queues")?;
        }
        Ok(())
    }

    async fn delete_queues(&self, tiers: &[String]) -> Result<()> {
        let topology = Names::new(&self.prefix)?.topology(tiers);
        let connection =
            Connection::connect(&self.amqp_url, ConnectionProperties::default()).await.context("RabbitMQ")?;
        let channel = connection.create_channel().await?;
        for queue in topology.queues {
            channel.queue_delete(queue.name.as_str().into(), QueueDeleteOptions::default()).await?;
        }
        for exchange in topology.exchanges {
            channel.exchange_delete(exchange.name.as_str().into(), ExchangeDeleteOptions::default()).await?;
        }
        // Everything has been answered; how the goodbye goes says nothing.
        let _ = connection.close(200, "done".into()).await;
        Ok(())
    }
}

async fn connect(url: &str) -> Result<SqlLedger> {
    SqlLedger::connect(url, SqlOptions { max_connections: 1, ..SqlOptions::default() }).await.context("the database")
}

/// The test kit waits in the calling thread until a server is up.
async fn blocking<T: Send + 'static>(start: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    tokio::task::spawn_blocking(start).await.context("starting a service")?
}

/// A load test floods what it is pointed at, so it can be pointed at this machine only.
fn check_loopback(url: &str) -> Result<()> {
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
    let authority = rest.split(['/', '?']).next().unwrap_or_default();
    let place = authority.rsplit_once('@').map_or(authority, |(_, place)| place);
    let host = match place.strip_prefix('[') {
        Some(v6) => v6.split(']').next().unwrap_or_default(),
        None => place.split(':').next().unwrap_or_default(),
    };
    let loopback = host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback());
    if loopback {
        return Ok(());
    }
    bail!("load tests run against this machine only; '{host}' is not 127.0.0.1, ::1 or localhost")
}

fn with_database(url: &str, database: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else { return url.to_owned() };
    let authority = rest.split('/').next().unwrap_or_default();
    format!("{scheme}://{authority}/{database}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_this_machine_is_loaded() {
        for good in
            ["mysql://a:b@127.0.0.1:3306/x", "redis://localhost", "amqp://a:p%40@[::1]:5672/%2f", "redis://127.9.9.9/1"]
        {
            check_loopback(good).unwrap();
        }
        for bad in [
            "mysql://a:127.0.0.1@10.0.0.7/x",
            "redis://example.com",
            "redis://127.0.0.1.example.com",
            "amqp://[2001:db8::1]/",
        ] {
            assert!(check_loopback(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_database_of_a_url_is_replaced() {
        assert_eq!(with_database("mysql://a:b@127.0.0.1:1/x?y", "z"), "mysql://a:b@127.0.0.1:1/z");
        assert_eq!(with_database("mysql://a:b@127.0.0.1:1", "z"), "mysql://a:b@127.0.0.1:1/z");
    }
}
