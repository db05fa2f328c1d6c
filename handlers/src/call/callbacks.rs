//! Where services bring their answers: an address for each attempt that waits, with a secret in it that nobody can guess.
//!
//! Promises: the first answer counts, and the same one again is told the same; an address takes nothing once its attempt is over, and
//! another attempt has another one. What is remembered is bounded. The ledger knows nothing of it: an answer that was taken here and is
//! lost with the worker is asked for again by the next attempt.

use crate::exec::FailClass;
use serde::Deserialize;
use shardcron_domain::limits::CALLBACKS_REMEMBERED;
use shardcron_domain::metric_names::{HTTP_CALLBACKS, LABEL_OUTCOME};
use shardcron_domain::units::Span;
use shardcron_domain::{AttemptRef, ExecutionId};
use shardcron_sdk::{Effects, ShardContext, ShardError};
use std::collections::{HashMap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use tokio::sync::oneshot;

/// The path below a worker's address under which the addresses are.
pub const CALLBACK_PATH: &str = "callbacks";

/// What a service is told when it calls back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallbackReply {
    /// The status: 202, 404, 409, 410, 413 or 422.
    pub status: u16,
    /// A sentence for its log.
    pub sentence: String,
}

impl CallbackReply {
    fn new(status: u16, sentence: impl Into<String>) -> Self {
        CallbackReply { status, sentence: sentence.into() }
    }
}

/// What a service says.
#[derive(Debug)]
pub(super) enum Said {
    /// It is done; the body of its answer.
    Answer(Vec<u8>),
    /// It has failed.
    Failed(ShardError),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Failure {
    message: String,
    #[serde(default)]
    class: FailClass,
    #[serde(default)]
    wait: Option<Span>,
}

enum State {
    /// For its answer; the effects hear that it moves.
    Waits(oneshot::Sender<Said>, Arc<dyn Effects>),
    /// The answer that came: what it was, as a digest.
    Taken(u64),
    /// It ended in another way.
    Over,
}

struct Slot {
    secret: String,
    /// Bytes that the answer may have.
    most: usize,
    state: State,
}

#[derive(Default)]
struct Book {
    slots: HashMap<AttemptRef, Slot>,
    /// Attempts that wait no more, the oldest first.
    ended: VecDeque<AttemptRef>,
}

/// The addresses of a worker. One for a process, shared by its web server and its handlers.
#[derive(Default)]
pub struct Callbacks {
    base: OnceLock<String>,
    book: Mutex<Book>,
}

impl std::fmt::Debug for Callbacks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Callbacks").field("base", &self.base.get()).finish_non_exhaustive()
    }
}

impl Callbacks {
    /// Says under which address services reach this worker, such as `http://10.0.0.7:8081`. Until then, and without it, jobs that need
    /// a callback are refused. Only the first call counts.
    pub fn reached_at(&self, base: &str) {
        let _ = self.base.set(base.trim_end_matches('/').to_owned());
    }

    fn lock(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens an address for an attempt; it takes an answer of `most` bytes until the result is dropped.
    pub(super) fn wait(self: &Arc<Self>, context: &ShardContext, most: usize) -> Result<Waiting, ShardError> {
        let Some(base) = self.base.get() else {
            return Err(ShardError::permanent(
                "the job wants to be called back, and this worker can't be: it listens nowhere (http.listen = \"off\" in the worker's \
                 configuration). Let it listen, or leave 'callback' out of the job",
            ));
        };
        let (attempt, secret) = (context.attempt, secret());
        let url = format!("{base}/{CALLBACK_PATH}/{}", token(attempt, &secret));
        let (said, answer) = oneshot::channel();
        let state = State::Waits(said, context.effects.clone());
        self.lock().slots.insert(attempt, Slot { secret, most, state });
        Ok(Waiting { url, answer, attempt, callbacks: self.clone() })
    }

    /// Bytes that an answer under this address may have, before any of them is read.
    ///
    /// # Errors
    /// What to reply instead: nobody waits there.
    pub fn admit(&self, token: &str) -> Result<usize, CallbackReply> {
        self.lock().find(token).map(|slot| slot.most)
    }

    /// Takes what a service says. `kind`: nothing for its answer, `fail`, or `progress`.
    pub fn take(&self, token: &str, kind: &str, body: &[u8]) -> CallbackReply {
        let reply = self.lock().take(token, kind, body).unwrap_or_else(|refused| refused);
        let outcome = if reply.status == 202 { "taken" } else { "refused" };
        metrics::counter!(HTTP_CALLBACKS, LABEL_OUTCOME => outcome).increment(1);
        reply
    }
}

impl Book {
    fn find(&mut self, token: &str) -> Result<&mut Slot, CallbackReply> {
        let unknown = || {
            CallbackReply::new(404, "there is no such address; take it from the header Shardcron-Callback as it stands")
        };
        let gone = || {
            CallbackReply::new(
                410,
                "nobody waits for an answer here any more: the attempt is over, or its worker was started anew. If another attempt \
                 follows, its request has another Shardcron-Callback",
            )
        };
        let (attempt, secret) = read_token(token).ok_or_else(unknown)?;
        let slot = self.slots.get_mut(&attempt).ok_or_else(gone)?;
        if !same(secret.as_bytes(), slot.secret.as_bytes()) {
            return Err(unknown());
        }
        if matches!(slot.state, State::Over) {
            return Err(gone());
        }
        Ok(slot)
    }

    fn take(&mut self, token: &str, kind: &str, body: &[u8]) -> Result<CallbackReply, CallbackReply> {
        let slot = self.find(token)?;
        if body.len() > slot.most {
            return Err(CallbackReply::new(413, format!("the answer is longer than {} bytes", slot.most)));
        }
        if kind == "progress" {
            if let State::Waits(_, effects) = &slot.state {
                effects.progress();
            }
            return Ok(CallbackReply::new(202, "noted"));
        }
        let said = match kind {
            "" => Said::Answer(body.to_vec()),
            "fail" => Said::Failed(failure(body)?),
            _ => {
                return Err(CallbackReply::new(
                    404,
                    "an answer goes to the address itself, or to /fail or /progress below it",
                ));
            }
        };
        let taken = || CallbackReply::new(202, "taken; it counts once the worker has recorded it");
        let digest = digest(kind, body);
        match std::mem::replace(&mut slot.state, State::Taken(digest)) {
            State::Waits(sender, _) => match sender.send(said) {
                Ok(()) => Ok(taken()),
                Err(_) => {
                    slot.state = State::Over;
                    Err(CallbackReply::new(410, "the attempt has just ended"))
                }
            },
            State::Taken(before) => {
                slot.state = State::Taken(before);
                match before == digest {
                    true => Ok(taken()),
                    false => {
                        Err(CallbackReply::new(409, "another answer came before this one, and the first one counts"))
                    }
                }
            }
            State::Over => Err(CallbackReply::new(410, "the attempt has just ended")),
        }
    }

    /// The attempt waits no more. Its address is remembered for a while, to tell who comes late or again.
    fn close(&mut self, attempt: AttemptRef) {
        let Some(slot) = self.slots.get_mut(&attempt) else { return };
        if matches!(slot.state, State::Waits(..)) {
            slot.state = State::Over;
        }
        self.ended.push_back(attempt);
        if self.ended.len() > CALLBACKS_REMEMBERED
            && let Some(oldest) = self.ended.pop_front()
        {
            self.slots.remove(&oldest);
        }
    }
}

fn failure(body: &[u8]) -> Result<ShardError, CallbackReply> {
    let unclear = |why: String| {
        let example = r#"{"message": "the bank is closed", "class": "transient", "wait": "10m"}"#;
        CallbackReply::new(422, format!("a failure is said like {example}: {why}"))
    };
    let Failure { message, class, wait } = serde_json::from_slice(body).map_err(|e| unclear(e.to_string()))?;
    let message = format!("the service called back that it failed: {message}");
    match (class, wait) {
        (FailClass::Permanent, None) => Ok(ShardError::permanent(message)),
        (FailClass::Permanent, Some(_)) => {
            Err(unclear("a permanent failure is not tried again, so it has no wait".into()))
        }
        (FailClass::Transient, Some(wait)) => Ok(ShardError::not_before(message, wait.as_std())),
        (FailClass::Transient, None) => Ok(ShardError::transient(message)),
    }
}

/// An open address. Dropped, it takes nothing any more.
pub(super) struct Waiting {
    /// The whole address, to be told to the service and to nobody else.
    pub(super) url: String,
    answer: oneshot::Receiver<Said>,
    attempt: AttemptRef,
    callbacks: Arc<Callbacks>,
}

impl Waiting {
    /// What the service says. Safe to be dropped and begun again.
    pub(super) async fn said(&mut self) -> Said {
        match (&mut self.answer).await {
            Ok(said) => said,
            // Another attempt has the slot, or it was answered already: nothing comes here any more.
            Err(_) => std::future::pending().await,
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.callbacks.lock().close(self.attempt);
    }
}

/// 256 bits.
fn secret() -> String {
    format!("{:032x}{:032x}", rand::random::<u128>(), rand::random::<u128>())
}

fn token(attempt: AttemptRef, secret: &str) -> String {
    format!("{}.{}.{}.{secret}", attempt.execution, attempt.index, attempt.attempt)
}

fn read_token(token: &str) -> Option<(AttemptRef, &str)> {
    let mut parts = token.split('.');
    let execution: ExecutionId = parts.next()?.parse().ok()?;
    let (index, attempt) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
    let secret = parts.next().filter(|secret| secret.len() == 64)?;
    parts.next().is_none().then_some((AttemptRef { execution, index, attempt }, secret))
}

/// Takes as long for a nearly right secret as for a wrong one.
fn same(shown: &[u8], right: &[u8]) -> bool {
    let different = shown.iter().zip(right).fold(0, |different, (a, b)| std::hint::black_box(different | (a ^ b)));
    shown.len() == right.len() && different == 0
}

fn digest(kind: &str, body: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    (kind, body).hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardcron_domain::shard::FailureClass;
    use shardcron_sdk::ShardSlice;
    use shardcron_sdk::testing::TestContext;

    fn context(attempt: u32) -> ShardContext {
        let mut context = TestContext::new(ShardSlice::Range { from: 1, to: 2 }).context();
        context.attempt.attempt = attempt;
        context
    }

    fn desk() -> Arc<Callbacks> {
        let callbacks = Arc::new(Callbacks::default());
        callbacks.reached_at("http://worker:8081/");
        callbacks
    }

    fn token_of(waiting: &Waiting) -> String {
        let token = waiting.url.strip_prefix("http://worker:8081/callbacks/");
        token.unwrap_or_else(|| panic!("{}", waiting.url)).to_owned()
    }

    #[tokio::test]
    async fn the_first_answer_counts_and_the_same_again_is_told_the_same() {
        let callbacks = desk();
        let mut waiting = callbacks.wait(&context(1), 100).unwrap();
        let token = token_of(&waiting);
        assert_eq!(callbacks.admit(&token), Ok(100));
        assert_eq!(callbacks.take(&token, "progress", b"").status, 202);
        assert_eq!(callbacks.take(&token, "", &[b'x'; 101]).status, 413);
        let first = callbacks.take(&token, "", b"{\"rows\":1}");
        assert_eq!(first.status, 202);
        assert!(matches!(waiting.said().await, Said::Answer(body) if body == b"{\"rows\":1}"));
        for ended in [false, true] {
            assert_eq!(callbacks.take(&token, "", b"{\"rows\":1}"), first, "{ended}");
            assert_eq!(callbacks.take(&token, "", b"{\"rows\":2}").status, 409);
            assert_eq!(callbacks.take(&token, "fail", b"{\"message\":\"no\"}").status, 409);
            if !ended {
                callbacks.lock().close(waiting.attempt);
            }
        }
    }

    #[tokio::test]
    async fn late_and_wrong_addresses_take_nothing() {
        let callbacks = desk();
        assert!(Arc::new(Callbacks::default()).wait(&context(1), 9).err().unwrap().message.contains("http.listen"));
        let waiting = callbacks.wait(&context(1), 9).unwrap();
        let old = token_of(&waiting);
        let mut wrong = old.clone();
        wrong.replace_range(old.len() - 1.., if old.ends_with('0') { "1" } else { "0" });
        for token in [wrong.as_str(), "", "x", &old[1..], &format!("{old}.1"), &old[..old.len() - 1]] {
            assert_eq!(callbacks.take(token, "", b"1").status, 404, "{token}");
        }
        drop(waiting);
        assert_eq!(callbacks.take(&old, "", b"1").status, 410, "the attempt is over");
        let mut next = callbacks.wait(&context(2), 9).unwrap();
        assert_ne!(token_of(&next), old);
        assert_eq!(callbacks.take(&old, "", b"1").status, 410);
        assert_eq!(desk().take(&old, "", b"1").status, 410, "a worker that was started anew");
        // Not consumed by what can't be read.
        let token = token_of(&next);
        for (kind, body) in [("fail", "{}"), ("fail", r#"{"message":"x","class":"permanent","wait":"1s"}"#)] {
            assert_eq!(callbacks.take(&token, kind, &body.as_bytes()[..body.len().min(9)]).status, 422, "{body}");
        }
        assert_eq!(callbacks.take(&token, "elsewhere", b"").status, 404);
        assert_eq!(callbacks.take(&token, "", b"2").status, 202);
        assert!(matches!(next.said().await, Said::Answer(body) if body == b"2"));
    }

    #[tokio::test]
    async fn failures_have_classes() {
        let callbacks = desk();
        for (n, (body, class)) in [
            (r#"{"message":"m"}"#, FailureClass::Transient),
            (r#"{"message":"m","class":"permanent"}"#, FailureClass::Permanent),
            (r#"{"message":"m","wait":"2m"}"#, FailureClass::NotBefore { wait_ms: 120_000 }),
        ]
        .into_iter()
        .enumerate()
        {
            let mut waiting = callbacks.wait(&context(n as u32 + 1), 999).unwrap();
            assert_eq!(callbacks.take(&token_of(&waiting), "fail", body.as_bytes()).status, 202);
            match waiting.said().await {
                Said::Failed(error) => assert_eq!(error.class, class, "{body}"),
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let callbacks = desk();
        let first = token_of(&callbacks.wait(&context(1), 9).unwrap());
        for n in 0..CALLBACKS_REMEMBERED {
            drop(callbacks.wait(&context(n as u32 + 2), 9).unwrap());
        }
        assert_eq!(callbacks.lock().slots.len(), CALLBACKS_REMEMBERED);
        assert_eq!(callbacks.take(&first, "", b"1").status, 410, "forgotten, and still told that it is over");
    }
}
