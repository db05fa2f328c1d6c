//! One process life as the ports see it: its clocks, its dice, and how its calls reach the services.

use super::World;
use super::plan::Class;
use shardcron_actors::{Clock, Entropy};
use std::sync::Arc;
use std::time::Duration;
use uuid::Uuid;

/// What a process talks to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Port {
    Ledger,
    /// Lease, presence and keys.
    Live,
    Broker,
}

pub(crate) const PORTS: [Port; 3] = [Port::Ledger, Port::Live, Port::Broker];

/// A process life: the node, and how many lives it had before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct LifeId {
    pub(crate) node: usize,
    pub(crate) number: u32,
}

#[derive(Clone)]
pub(crate) struct Life {
    pub(crate) world: Arc<World>,
    pub(crate) id: LifeId,
}

/// What the network does to a call.
enum Fate {
    Arrives,
    /// An error, after this long.
    Fails(i64),
    /// An error at once; the effect comes after this long.
    Late(i64),
}

impl Life {
    /// The call on its way there.
    ///
    /// # Errors
    /// It did not arrive, or the caller is told so: `Some` if it arrives later all the same, after that many milliseconds.
    pub(crate) async fn request(&self, port: Port, may_be_late: bool) -> Result<(), (String, Option<i64>)> {
        self.travel().await;
        match self.fate(port, may_be_late) {
            Fate::Arrives => Ok(()),
            Fate::Fails(after) => {
                sleep_ms(after).await;
                Err((format!("{port:?} did not hear"), None))
            }
            Fate::Late(after) => Err((format!("{port:?} did not answer"), Some(after))),
        }
    }

    /// Whether a call that can't wait does not arrive: the error, and after how long the caller hears of it.
    pub(crate) fn lost_at_once(&self, port: Port) -> Option<(String, i64)> {
        match self.fate(port, false) {
            Fate::Arrives => None,
            Fate::Fails(after) | Fate::Late(after) => Some((format!("{port:?} did not hear"), after)),
        }
    }

    /// The answer on its way back.
    ///
    /// # Errors
    /// It was lost: the call had its effect, and the caller does not know.
    pub(crate) async fn answer(&self, port: Port) -> Result<(), String> {
        self.travel().await;
        match self.fate(port, false) {
            Fate::Arrives => Ok(()),
            Fate::Fails(after) | Fate::Late(after) => {
                sleep_ms(after).await;
                Err(format!("the answer of {port:?} was lost"))
            }
        }
    }

    async fn travel(&self) {
        let slow = self.world.chaos() && self.world.plan.has(Class::Slow);
        let wait = self.world.dice(|d| if slow && d.percent(5) { d.of(50, 4_000) } else { d.of(0, 2) });
        sleep_ms(wait).await;
    }

    fn fate(&self, port: Port, may_be_late: bool) -> Fate {
        let world = &self.world;
        let limit = world.plan.call_limit_ms;
        if world.net(|net| net.is_cut(self.id.node, port)) {
            // Refused at once, or sent into nowhere.
            return Fate::Fails(world.dice(|d| if d.percent(50) { d.of(0, 5) } else { d.of(200, limit) }));
        }
        if !world.chaos() {
            return Fate::Arrives;
        }
        if may_be_late && world.plan.has(Class::LateCalls) && world.dice(|d| d.percent(4)) {
            return Fate::Late(world.dice(|d| d.of(1, 8_000)));
        }
        if world.plan.has(Class::LostCalls) && world.dice(|d| d.percent(3)) {
            return Fate::Fails(world.dice(|d| d.of(0, limit.min(3_000))));
        }
        Fate::Arrives
    }

    /// The wall clock of the node.
    pub(crate) fn wall_ms(&self) -> i64 {
        self.world.now_ms() + self.world.net(|net| net.offset(self.id.node))
    }
}

pub(crate) async fn sleep_ms(ms: i64) {
    if ms > 0 {
        tokio::time::sleep(Duration::from_millis(ms.unsigned_abs())).await;
    }
}

impl Clock for Life {
    fn now_ms(&self) -> i64 {
        self.wall_ms()
    }

    fn mono_ms(&self) -> i64 {
        self.world.now_ms() - super::BEGIN_MS
    }
}

impl Entropy for Life {
    fn draw(&self) -> u64 {
        self.world.dice(|d| d.bits())
    }

    fn id(&self) -> Uuid {
        let bits = self.world.dice(|d| (u128::from(d.bits()) << 64) | u128::from(d.bits()));
        let bytes = bits.to_be_bytes();
        let mut random = [0; 10];
        random.copy_from_slice(&bytes[..10]);
        uuid::Builder::from_unix_timestamp_millis(self.wall_ms().unsigned_abs(), &random).into_uuid()
    }
}
