//! Lease, presence and keys of a process: the ledger's own adapters, or a Redis in a few lines.

use super::World;
use super::life::{Life, Port};
use async_trait::async_trait;
use shardcron_domain::{AttemptRef, Incarnation};
use shardcron_store::sql::{LedgerLease, LedgerPresence};
use shardcron_store::*;
use std::collections::BTreeMap;
use std::time::Duration;

/// How long the keys are kept; the default of the program.
const KEYS_MS: i64 = 120_000;

/// What the Redis holds. Its clock is the world's.
#[derive(Default)]
pub(crate) struct Redis {
    lease: Option<(String, i64)>,
    beats: BTreeMap<Incarnation, (WorkerBeat, i64)>,
    keys: BTreeMap<AttemptRef, (bool, i64)>,
}

impl Redis {
    pub(crate) fn flush(&mut self) {
        *self = Redis::default();
    }

    fn holder(&self, now_ms: i64) -> Option<&str> {
        self.lease.as_ref().filter(|(_, until)| *until > now_ms).map(|(token, _)| token.as_str())
    }
}

pub(crate) struct SimLive(pub(crate) Life);

fn away(detail: String) -> StoreError {
    StoreError::Unavailable { store: "live", detail }
}

impl SimLive {
    async fn call<T: std::fmt::Debug>(
        &self,
        what: &'static str,
        effect: impl FnOnce(&World) -> Result<T> + Send,
    ) -> Result<T> {
        self.0.request(Port::Live, false).await.map_err(|(why, _)| away(why))?;
        let answer = effect(&self.0.world);
        self.0.note(what, &answer);
        self.0.answer(Port::Live).await.map_err(away)?;
        answer
    }

    async fn lease(&self, what: &'static str, token: &str, ttl: Duration) -> Result<LeaseAnswer> {
        let (life, ttl_ms) = (self.0.id, ttl.as_millis() as i64);
        let effect = |world: &World| {
            let now = world.now_ms();
            let answer = if world.plan.redis {
                world.redis(|redis| {
                    let answer = match redis.holder(now) {
                        Some(holder) if holder == token => LeaseAnswer::Mine,
                        Some(holder) => LeaseAnswer::HeldBy(holder.to_owned()),
                        None if what == "renew" => LeaseAnswer::Nobody,
                        None => LeaseAnswer::Mine,
                    };
                    if answer == LeaseAnswer::Mine {
                        redis.lease = Some((token.to_owned(), now + ttl_ms));
                    }
                    answer
                })
            } else {
                let lease = LedgerLease { ledger: world.sql().clone(), name: "trigger".into() };
                match what {
                    "renew" => world.real(lease.renew(token, ttl))?,
                    _ => world.real(lease.acquire(token, ttl))?,
                }
            };
            if answer == LeaseAnswer::Mine {
                world.oracle(|o| o.lease_taken(life, now + ttl_ms));
            }
            Ok(answer)
        };
        self.call(what, effect).await
    }
}

#[async_trait]
impl LeaseStore for SimLive {
    async fn acquire(&self, token: &str, ttl: Duration) -> Result<LeaseAnswer> {
        self.lease("acquire", token, ttl).await
    }

    async fn renew(&self, token: &str, ttl: Duration) -> Result<LeaseAnswer> {
        self.lease("renew", token, ttl).await
    }

    async fn holder(&self) -> Result<Option<String>> {
        let effect = |world: &World| {
            if world.plan.redis {
                let now = world.now_ms();
                return Ok(world.redis(|redis| redis.holder(now).map(str::to_owned)));
            }
            world.real(LedgerLease { ledger: world.sql().clone(), name: "trigger".into() }.holder())
        };
        self.call("holder", effect).await
    }

    async fn release(&self, token: &str) -> Result<()> {
        let life = self.0.id;
        let effect = |world: &World| {
            if world.plan.redis {
                let now = world.now_ms();
                world.redis(|redis| {
                    if redis.holder(now) == Some(token) {
                        redis.lease = None;
                    }
                });
            } else {
                let lease = LedgerLease { ledger: world.sql().clone(), name: "trigger".into() };
                world.real(lease.release(token))?;
            }
            world.oracle(|o| o.lease_released(life));
            Ok(())
        };
        self.call("release", effect).await
    }
}

#[async_trait]
impl Presence for SimLive {
    async fn beat(&self, beat: &WorkerBeat, lost_after: Duration) -> Result<()> {
        // The one thing that is different each time.
        let beat = WorkerBeat { pid: self.0.id.number, ..beat.clone() };
        let effect = |world: &World| {
            if world.plan.redis {
                let now = world.now_ms();
                world.redis(|redis| redis.beats.insert(beat.incarnation, (beat, now)));
                return Ok(());
            }
            world.real(LedgerPresence { ledger: world.sql().clone() }.beat(&beat, lost_after))
        };
        self.call("beat", effect).await
    }

    async fn leave(&self, who: Incarnation) -> Result<()> {
        let effect = |world: &World| {
            if world.plan.redis {
                world.redis(|redis| redis.beats.remove(&who));
                return Ok(());
            }
            world.real(LedgerPresence { ledger: world.sql().clone() }.leave(who))
        };
        self.call("leave", effect).await
    }

    async fn workers(&self) -> Result<Vec<SeenWorker>> {
        let effect = |world: &World| {
            if !world.plan.redis {
                return world.real(LedgerPresence { ledger: world.sql().clone() }.workers());
            }
            let now = world.now_ms();
            let seen = |(beat, at): &(WorkerBeat, i64)| SeenWorker { beat: beat.clone(), age_ms: now - at };
            Ok(world.redis(|redis| redis.beats.values().map(seen).collect()))
        };
        self.call("workers", effect).await
    }
}

#[async_trait]
impl IdempotencyStore for SimLive {
    async fn begin(&self, attempts: &[AttemptRef]) -> Result<Vec<IdempotencyHint>> {
        if !self.0.world.plan.redis {
            return NoIdempotency.begin(attempts).await;
        }
        let effect = |world: &World| {
            let now = world.now_ms();
            Ok(world.redis(|redis| {
                let mut hint = |at: &AttemptRef| match redis.keys.get(at).filter(|(_, until)| *until > now) {
                    Some((true, _)) => IdempotencyHint::Done,
                    Some((false, _)) => IdempotencyHint::Claimed,
                    None => {
                        redis.keys.insert(*at, (false, now + KEYS_MS));
                        IdempotencyHint::Fresh
                    }
                };
                attempts.iter().map(&mut hint).collect()
            }))
        };
        self.call("begin", effect).await
    }

    async fn finish(&self, attempts: &[AttemptRef]) -> Result<()> {
        if !self.0.world.plan.redis {
            return Ok(());
        }
        let effect = |world: &World| {
            let now = world.now_ms();
            world.redis(|redis| redis.keys.extend(attempts.iter().map(|at| (*at, (true, now + KEYS_MS)))));
            Ok(())
        };
        self.call("finish", effect).await
    }
}
