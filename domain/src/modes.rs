//! The degraded ways of working, and what each means for the person on call.

use serde::Serialize;

/// Something is away, and its work is done in another way until it is back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// Redis is away: lease, presence and idempotency are the ledger's, under the same epochs.
    RedisAway,
    /// RabbitMQ is away: workers poll the ledger.
    BrokerAway,
    /// No scheduler leads: a worker fires what must not wait.
    SchedulersAway,
    /// The ledger is away: nothing new is claimed, and finished results are held.
    LedgerAway,
}

impl Mode {
    /// All of them.
    pub const ALL: [Mode; 4] = [Mode::RedisAway, Mode::BrokerAway, Mode::SchedulersAway, Mode::LedgerAway];

    /// The name in metrics and JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Mode::RedisAway => "redis_away",
            Mode::BrokerAway => "broker_away",
            Mode::SchedulersAway => "schedulers_away",
            Mode::LedgerAway => "ledger_away",
        }
    }

    /// By its name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|mode| mode.name() == name)
    }

    /// What goes on in it, in a sentence.
    #[must_use]
    pub fn what_goes_on(self) -> &'static str {
        match self {
            Mode::RedisAway => "lease, heartbeats and idempotency go by the ledger until Redis is back",
            Mode::BrokerAway => "workers take shards from the ledger, core first, until RabbitMQ is back",
            Mode::SchedulersAway => "a worker fires core jobs, bulk jobs wait, until a scheduler leads again",
            Mode::LedgerAway => "nothing new is started; finished results are held until the ledger is back",
        }
    }
}
