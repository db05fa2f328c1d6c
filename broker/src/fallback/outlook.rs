//! What one process knows: whether its own broker is away, and whether the leader says that shards are without messages.

use super::NOTE_EVERY;
use crate::health::CLOSED;
use crate::port::BrokerState;
use shardcron_store::Ledger;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::MissedTickBehavior;

/// Shared by a fallback broker and all its consumers.
pub(super) struct Outlook {
    seen: watch::Sender<Seen>,
    fault: watch::Sender<Option<String>>,
    reads_note: AtomicBool,
}

/// Who finds that a queue does not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Side {
    /// A consumer, which is not served.
    Consuming,
    /// A publisher, to whom nothing is confirmed.
    Publishing,
}

#[derive(Clone, Debug, Default)]
struct Seen {
    /// Why this process can't reach the broker, once it has been so for long enough.
    away: Option<String>,
    /// Since when the leader hands out through the ledger, milliseconds UTC.
    noted: Option<i64>,
    /// Tiers whose queues do not answer although the broker is there, as a consumer or a publisher of this process sees it.
    silent: BTreeSet<(String, Side)>,
    closed: bool,
}

impl Seen {
    fn fault(&self) -> Option<String> {
        let noted =
            || self.noted.map(|_| "the leader can't reach the broker and hands out through the ledger".to_owned());
        let silent = || {
            let tiers: BTreeSet<&str> = self.silent.iter().map(|(tier, _)| tier.as_str()).collect();
            let tiers: Vec<&str> = tiers.into_iter().collect();
            (!tiers.is_empty()).then(|| format!("the broker is there, but not the queue of tier {}", tiers.join(", ")))
        };
        self.away.clone().or_else(noted).or_else(silent)
    }

    fn polls(&self, tier: &str) -> bool {
        self.away.is_some() || self.noted.is_some() || self.silent.iter().any(|(silent, _)| silent == tier)
    }
}

impl Outlook {
    pub(super) fn new() -> Self {
        Self {
            seen: watch::Sender::new(Seen::default()),
            fault: watch::Sender::new(None),
            reads_note: AtomicBool::new(false),
        }
    }

    /// Whether this process does without the broker.
    pub(super) fn fallen(&self) -> bool {
        self.seen.borrow().away.is_some()
    }

    /// Waits until it does.
    pub(super) async fn falls(&self) {
        // The sender is in here, so it can't be gone.
        let _ = self.seen.subscribe().wait_for(|seen| seen.away.is_some()).await;
    }

    /// Whether consumers of a tier are to poll the ledger.
    pub(super) fn polls(&self, tier: &str) -> bool {
        self.seen.borrow().polls(tier)
    }

    /// Whether a tier's queue is known not to answer.
    pub(super) fn is_silent(&self, tier: &str, side: Side) -> bool {
        self.seen.borrow().silent.contains(&(tier.to_owned(), side))
    }

    /// A tier's queue does not answer, or does again. True if that is news.
    pub(super) fn set_silent(&self, tier: &str, side: Side, silent: bool) -> bool {
        if self.is_silent(tier, side) == silent {
            return false;
        }
        self.update(|seen| {
            let key = (tier.to_owned(), side);
            if silent {
                seen.silent.insert(key);
            } else {
                seen.silent.remove(&key);
            }
        });
        true
    }

    /// Something that `polls` depends on has changed; ends when the broker is closed.
    pub(super) fn changes(&self) -> Changes {
        Changes(self.seen.subscribe())
    }

    pub(super) fn fault(&self) -> watch::Receiver<Option<String>> {
        self.fault.subscribe()
    }

    pub(super) fn close(&self) {
        self.update(|seen| seen.closed = true);
    }

    fn update(&self, change: impl FnOnce(&mut Seen)) {
        self.seen.send_modify(|seen| {
            change(seen);
            // In here, so that two writers can't publish their views in the wrong order. A new reason for the same fault is none.
            let fault = seen.fault();
            self.fault.send_if_modified(|now| {
                let turned = now.is_some() != fault.is_some();
                if turned {
                    *now = fault;
                }
                turned
            });
        });
    }

    /// Begins to read the leader's note; for processes that consume. Once is enough.
    pub(super) fn read_note(self: &Arc<Self>, ledger: &Arc<dyn Ledger>, runtime: &tokio::runtime::Handle) {
        if !self.reads_note.swap(true, Ordering::Relaxed) {
            runtime.spawn(watch_note(self.clone(), ledger.clone()));
        }
    }
}

/// See [`Outlook::changes`].
pub(super) struct Changes(watch::Receiver<Seen>);

impl Changes {
    /// Waits for the next; false when there is none, as the broker is closed.
    pub(super) async fn next(&mut self) -> bool {
        self.0.changed().await.is_ok() && !self.0.borrow().closed
    }

    /// Waits until the broker is closed.
    pub(super) async fn closed(&mut self) {
        let _ = self.0.wait_for(|seen| seen.closed).await;
    }
}

/// Falls back when the broker has been away for long enough, and comes back with it at once.
pub(super) async fn watch_broker(outlook: Arc<Outlook>, mut state: watch::Receiver<BrokerState>, after: Duration) {
    let mut changes = outlook.changes();
    loop {
        let away = match &*state.borrow_and_update() {
            BrokerState::Away(why) if why == CLOSED => return,
            BrokerState::Away(why) => Some(why.clone()),
            BrokerState::Up | BrokerState::Blocked(_) => None,
        };
        let Some(why) = away else {
            if outlook.fallen() {
                outlook.update(|seen| seen.away = None);
                tracing::info!("the broker is back; shards go through it again");
            }
            tokio::select! {
                changed = state.changed() => if changed.is_err() { return },
                () = changes.closed() => return,
            }
            continue;
        };
        // Further tries to reconnect change the reason only, and must not begin the wait anew.
        let back = state.wait_for(|s| !matches!(s, BrokerState::Away(_)));
        let waited = async {
            if outlook.fallen() {
                return back.await.is_ok();
            }
            match tokio::time::timeout(after, back).await {
                Ok(back) => back.is_ok(),
                Err(_) => {
                    outlook.update(|seen| seen.away = Some(why));
                    true
                }
            }
        };
        tokio::select! {
            goes_on = waited => if !goes_on { return },
            () = changes.closed() => return,
        }
    }
}

/// Reads whether there are shards without messages. A ledger that is away changes nothing: nothing could be claimed either.
async fn watch_note(outlook: Arc<Outlook>, ledger: Arc<dyn Ledger>) {
    let mut ticks = tokio::time::interval(NOTE_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut changes = outlook.changes();
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            () = changes.closed() => return,
        }
        match ledger.polling().await {
            Ok(polling) => {
                let noted = polling.map(|p| p.since_ms);
                if outlook.seen.borrow().noted != noted {
                    outlook.update(|seen| seen.noted = noted);
                }
            }
            Err(error) => tracing::debug!(%error, "the leader's note could not be read"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn away(why: &str) -> BrokerState {
        BrokerState::Away(why.into())
    }

    #[tokio::test(start_paused = true)]
    async fn it_falls_back_after_the_grace_and_comes_back_at_once() {
        let outlook = Arc::new(Outlook::new());
        let (state, seen) = watch::channel(away("not connected yet"));
        tokio::spawn(watch_broker(outlook.clone(), seen, Duration::from_secs(2)));
        let began = tokio::time::Instant::now();
        for _ in 0..6 {
            tokio::time::sleep(Duration::from_millis(300)).await;
            state.send_replace(away("refused"));
        }
        assert!(!outlook.fallen(), "not yet");
        outlook.falls().await;
        assert_eq!(began.elapsed().as_secs(), 2, "new reasons do not begin the wait anew");
        assert!(outlook.polls("core") && outlook.fault().borrow().is_some());
        let mut fault = outlook.fault();
        state.send_replace(BrokerState::Blocked("low memory".into()));
        fault.wait_for(Option::is_none).await.unwrap();
        assert!(!outlook.polls("core"), "blocked is not away");
        state.send_replace(away("cut"));
        tokio::time::sleep(Duration::from_millis(1_900)).await;
        state.send_replace(BrokerState::Up);
        tokio::time::sleep(Duration::from_millis(1_900)).await;
        state.send_replace(away("cut"));
        tokio::time::sleep(Duration::from_millis(1_900)).await;
        assert!(!outlook.fallen(), "short interruptions are waited out");
    }

    #[test]
    fn a_silent_queue_makes_its_own_tier_poll() {
        let outlook = Outlook::new();
        let (consuming, publishing) = (Side::Consuming, Side::Publishing);
        assert!(outlook.set_silent("core", consuming, true) && !outlook.set_silent("core", consuming, true));
        assert!(outlook.polls("core") && !outlook.polls("bulk") && !outlook.fallen());
        assert!(!outlook.is_silent("core", publishing), "a consumer that is not served keeps nobody from publishing");
        assert!(outlook.fault().borrow().as_ref().is_some_and(|why| why.contains("tier core")));
        assert!(outlook.set_silent("core", publishing, true) && outlook.set_silent("core", consuming, false));
        assert!(outlook.polls("core"));
        assert!(outlook.set_silent("core", publishing, false));
        assert!(!outlook.polls("core") && outlook.fault().borrow().is_none());
    }
}
