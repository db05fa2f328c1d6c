//! The `http` handler: a call of a service for each shard.
//!
//! Promises: a request goes nowhere but to the origin that the job names and the worker allows; the answer is bounded in size and time;
//! every attempt at a shard sends the same `Idempotency-Key` and, byte by byte, the same body. A request is repeated within an attempt
//! only where the service can't have seen it (no connection was made). Everything else is an attempt's failure, and the next attempt
//! asks again: at least once, unless the service honours the key.
//!
//! A service that takes its time answers 202 with a `Location`, and is asked there until it has an end. The address is the shard's
//! checkpoint, so that a later attempt goes on asking and does not begin anew. If the job says so, it is also told an address at which
//! it may bring its answer itself; whichever answer comes first counts.

mod callbacks;
mod client;
mod judge;
mod tls;

pub use callbacks::{CALLBACK_PATH, CallbackReply, Callbacks};

use crate::ShardLedger;
use crate::{input, map};
use callbacks::{Said, Waiting};
use client::{Answer, Clients, NoAnswer, Question};
use http::header::{HeaderMap, HeaderName, HeaderValue};
use hyper::body::Bytes;
use judge::{Verdict, judge};
use shardcron_domain::http_call::{HeaderSource, HttpSpec, Origin, SecretSource};
use shardcron_domain::limits::{CHECKPOINT_BYTES, EMITS_ANSWER_BYTES, HTTP_ANSWER_BYTES, REDUCE_BODY_BYTES};
use shardcron_domain::shard::{Checkpoint, Phase};
use shardcron_sdk::{CheckpointError, ShardContext, ShardError, ShardHandler, ShardOutput, ShardSlice, async_trait};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Waits between tries to connect within one attempt.
const CONNECT_WAITS: [Duration; 2] = [Duration::from_millis(200), Duration::from_secs(1)];
/// Answers in a row that a service which works on may fail to give.
const POLL_FAILURES: u32 = 10;
/// Redirects that one result may be behind.
const HOPS: u32 = 5;
/// How long a service is told that its work is not wanted any more.
const FAREWELL: Duration = Duration::from_secs(2);
/// A secret in a file.
const SECRET_BYTES: u64 = 64 * 1024;
/// Waiting for nothing but the service, the job's timeout and the worker's word.
const LONG: Duration = Duration::from_secs(365 * 86_400);
/// The header that says where the service may bring its answer. Not in the body, which is the same for every attempt.
const CALLBACK_HEADER: &str = "shardcron-callback";

/// What a checkpoint begins with that holds the address where a service is asked.
const ASKED_AT: &str = "asked at ";
/// The checkpoint after a service has forgotten what it worked on.
const FORGOTTEN: &str = "forgotten by the service";

/// What a worker's configuration says about calls.
#[derive(Clone, Debug, Default)]
pub struct HttpRules {
    /// Origins that may be called; `*` for any. Empty: none.
    pub allow: Vec<String>,
    /// Secrets that may be sent, as `env:NAME` or `file:/path`.
    pub secrets: Vec<String>,
    /// A file of certificates (PEM) that are trusted beside the machine's own.
    pub authorities: Option<PathBuf>,
    /// Where services bring their answers.
    pub callbacks: Arc<Callbacks>,
}

impl HttpRules {
    /// Looks at the file of certificates, so that a worker says at its start what is wrong with it, and not in the night at a call.
    ///
    /// # Errors
    /// It can't be read, or is none: a sentence for people.
    pub fn check(&self) -> Result<(), String> {
        self.authorities.as_deref().map_or(Ok(()), |file| tls::config(Some(file)).map(drop))
    }
}

/// The clients and rules of a worker, shared by its handlers.
pub(crate) struct Caller {
    clients: Clients,
    rules: HttpRules,
    ledger: Arc<dyn ShardLedger>,
}

impl Caller {
    pub(crate) fn new(rules: HttpRules, ledger: Arc<dyn ShardLedger>) -> Self {
        Caller { clients: Clients::trusting(rules.authorities.clone()), rules, ledger }
    }

    /// The handler of a call, if this worker may make it.
    pub(crate) fn resolve(self: &Arc<Self>, call: &HttpSpec) -> Result<HttpHandler, ShardError> {
        let origin = Origin::of(&call.url).map_err(ShardError::permanent)?;
        if !self.rules.allow.iter().any(|entry| origin.is_allowed_by(entry)) {
            return Err(ShardError::permanent(not_allowed(&origin, &self.rules.allow)));
        }
        for source in call.headers.values() {
            if let HeaderSource::Secret { from, .. } = source
                && !self.rules.secrets.contains(&from.to_string())
            {
                return Err(ShardError::permanent(format!(
                    "this worker does not let jobs send the secret {from}. To allow it, add \"{from}\" to allow_secrets in the \
                     worker's own configuration (a job can't do that)"
                )));
            }
        }
        Ok(HttpHandler { call: call.clone(), caller: self.clone() })
    }
}

fn not_allowed(origin: &Origin, allowed: &[String]) -> String {
    let has =
        if allowed.is_empty() { "it allows none".to_owned() } else { format!("it allows: {}", allowed.join(", ")) };
    format!(
        "this worker does not allow calls of {origin}; {has}. To allow it, add \"{origin}\" to allow_http in the worker's own \
         configuration (a job can't do that)"
    )
}

/// Calls a service.
pub(crate) struct HttpHandler {
    call: HttpSpec,
    caller: Arc<Caller>,
}

#[async_trait]
impl ShardHandler for HttpHandler {
    async fn run(&self, mut context: ShardContext) -> Result<ShardOutput, ShardError> {
        let headers = self.headers(&context)?;
        let ended = match self.asked_at(&context) {
            Some(url) => self.follow(&mut context, &headers, (url, None), None).await,
            None => self.begin(&mut context, &headers).await,
        };
        match ended {
            Err(error) if error.stopped && context.is_overdue() => {
                Err(ShardError::timeout("the service was not done at the job's timeout"))
            }
            other => other,
        }
    }
}

impl HttpHandler {
    /// Sends the request, and follows the service if it works on.
    async fn begin(&self, context: &mut ShardContext, headers: &HeaderMap) -> Result<ShardOutput, ShardError> {
        let body = Bytes::from(body(context).await?);
        let mut waiting = self.open(context)?;
        let mut sent = headers.clone();
        if let Some(waiting) = &waiting {
            let mut value = HeaderValue::from_str(&waiting.url)
                .map_err(|e| ShardError::permanent(format!("the callback's address: {e}")))?;
            value.set_sensitive(true);
            sent.insert(CALLBACK_HEADER, value);
        }
        let (method, keep) = (self.call.method.word(), room(context));
        let question = Question { method, url: &self.call.url, headers: &sent, body: Some(body), keep };
        // A service may be quicker with its callback than with its answer.
        let answer = match first_of(&mut waiting, self.ask_until_reached(context, &question)).await {
            First::Said(said) => return self.conclude(context, said).await,
            First::Done(answer) => answer?,
        };
        match judge(&answer, &self.call.url, crate::now_ms(), maps(context)) {
            Verdict::Done(output, payloads) => emit(context, payloads).await.map(|()| output),
            Verdict::Failed(error) => Err(error),
            Verdict::Working { at: None, .. } if waiting.is_some() => {
                context.log("the service works on it, and will call back");
                match first_of(&mut waiting, pause(context, LONG)).await {
                    First::Said(said) => self.conclude(context, said).await,
                    First::Done(over) => Err(over.err().unwrap_or_else(|| ShardError::stopped("it waited for a year"))),
                }
            }
            Verdict::Working { at: None, .. } => Err(ShardError::permanent(
                "the service answered 202, that it works on it, without a Location where it can be asked for the end, and the job does \
                 not let it call back (callback = true)",
            )),
            Verdict::Working { at: Some(url), wait } => {
                context.log(format_args!("the service works on it; asked at {url}"));
                // The address can't be kept, or not in time: the next attempt sends the request again, under the same key.
                let kept = format!("{ASKED_AT}{url}");
                if kept.len() <= CHECKPOINT_BYTES {
                    keep_checkpoint(context, kept).await?;
                }
                self.follow(context, headers, (url, wait), waiting).await
            }
        }
    }

    /// An address for the service's answer, if the job wants one.
    fn open(&self, context: &ShardContext) -> Result<Option<Waiting>, ShardError> {
        self.call.callback.then(|| self.caller.rules.callbacks.wait(context, room(context))).transpose()
    }

    /// What a callback means: the same as an answer with its body would.
    async fn conclude(&self, context: &ShardContext, said: Said) -> Result<ShardOutput, ShardError> {
        let body = match said {
            Said::Failed(error) => return Err(error),
            Said::Answer(body) => body,
        };
        context.log("the service has called back");
        let answer = Answer { status: http::StatusCode::OK, headers: HeaderMap::new(), body, cut: false };
        match judge(&answer, &self.call.url, crate::now_ms(), maps(context)) {
            Verdict::Done(output, payloads) => emit(context, payloads).await.map(|()| output),
            Verdict::Failed(error) => Err(error),
            Verdict::Working { .. } => Err(ShardError::transient("a callback can't say that the work goes on")),
        }
    }

    /// Repeats what the service can't have seen.
    async fn ask_until_reached(&self, context: &ShardContext, question: &Question<'_>) -> Result<Answer, ShardError> {
        let mut waits = CONNECT_WAITS.iter();
        loop {
            let limit = self.limit(context);
            let why = match self.caller.clients.ask(question, limit, &context.stop).await {
                Ok(answer) => return Ok(answer),
                Err(NoAnswer::NotReached(why)) => why,
                Err(NoAnswer::NotTrusted(why)) => {
                    return Err(ShardError::transient(format!(
                        "the service at {} is not trusted: {why}",
                        self.call.url
                    )));
                }
                Err(NoAnswer::Unknown(why)) => {
                    return Err(ShardError::transient(format!(
                        "{why}. Whether the service did it is not known; the next attempt asks again under the same Idempotency-Key"
                    )));
                }
                Err(NoAnswer::Impossible(why)) => return Err(ShardError::permanent(why)),
                Err(NoAnswer::Stopped) => return Err(ShardError::stopped("told to stop; the request was given up")),
            };
            let Some(wait) = waits.next() else {
                return Err(ShardError::transient(format!("the service at {} can't be reached: {why}", self.call.url)));
            };
            pause(context, *wait).await?;
        }
    }

    fn limit(&self, context: &ShardContext) -> Duration {
        let limit = self.call.timeout.as_std();
        context.time_left().map_or(limit, |left| limit.min(left))
    }

    /// Asks until there is an end, or until the service brings it.
    async fn follow(
        &self,
        context: &mut ShardContext,
        headers: &HeaderMap,
        (mut url, first): (String, Option<Duration>),
        mut waiting: Option<Waiting>,
    ) -> Result<ShardOutput, ShardError> {
        let poll = self.call.poll;
        let (mut wait, mut asked_for) = (poll.first.as_std(), first);
        let (mut failures, mut hops, mut last) = (0, 0, Vec::new());
        loop {
            let now = asked_for.take().unwrap_or(wait).min(poll.max.as_std().max(Duration::from_secs(300)));
            wait = (wait.mul_f64(1.5)).min(poll.max.as_std());
            let paused = match first_of(&mut waiting, pause(context, now)).await {
                First::Said(said) => return self.conclude(context, said).await,
                First::Done(paused) => paused,
            };
            if let Err(stopped) = paused {
                self.say_goodbye(context, headers, &url).await;
                return Err(stopped);
            }
            let question = Question { method: "GET", url: &url, headers, body: None, keep: room(context) };
            let asked = self.caller.clients.ask(&question, self.limit(context), &context.stop);
            let answer = match first_of(&mut waiting, asked).await {
                First::Said(said) => return self.conclude(context, said).await,
                First::Done(Ok(answer)) => answer,
                First::Done(Err(NoAnswer::Stopped)) => {
                    self.say_goodbye(context, headers, &url).await;
                    return Err(ShardError::stopped("told to stop while the service worked"));
                }
                First::Done(Err(NoAnswer::Impossible(why))) => return Err(ShardError::permanent(why)),
                First::Done(Err(NoAnswer::NotReached(why) | NoAnswer::NotTrusted(why) | NoAnswer::Unknown(why))) => {
                    failures += 1;
                    if failures >= POLL_FAILURES {
                        return Err(ShardError::transient(format!("the service can't be asked at {url}: {why}")));
                    }
                    continue;
                }
            };
            if matches!(answer.status.as_u16(), 404 | 410) {
                keep_checkpoint(context, FORGOTTEN.to_owned()).await?;
                return Err(ShardError::transient(format!(
                    "the service has forgotten what it worked on ({} at {url}); the next attempt sends the request again",
                    answer.status.as_u16()
                )));
            }
            match judge(&answer, &url, crate::now_ms(), maps(context)) {
                Verdict::Done(output, payloads) => return emit(context, payloads).await.map(|()| output),
                Verdict::Working { at, wait } => {
                    failures = 0;
                    asked_for = wait;
                    // An answer that never changes is no progress; a stall_timeout ends it.
                    if answer.body != last {
                        last = answer.body;
                        context.progress();
                    }
                    if let Some(next) = at.filter(|next| *next != url) {
                        hops += 1;
                        if hops > HOPS {
                            return Err(ShardError::permanent(format!(
                                "the service has led on {HOPS} times, last to {next}"
                            )));
                        }
                        url = next;
                    }
                }
                Verdict::Failed(error) if error.class == shardcron_sdk::FailureClass::Permanent => return Err(error),
                Verdict::Failed(error) => {
                    failures += 1;
                    if failures >= POLL_FAILURES {
                        return Err(error);
                    }
                }
            }
        }
    }

    /// Tells the service that its work is not wanted any more: past the timeout, and where the execution was cancelled. A worker that
    /// only shuts down leaves it to the next attempt.
    async fn say_goodbye(&self, context: &ShardContext, headers: &HeaderMap, url: &str) {
        if !context.is_overdue() && !self.cancelled(context).await {
            return;
        }
        let question = Question { method: "DELETE", url, headers, body: None, keep: HTTP_ANSWER_BYTES };
        let never = tokio_util::sync::CancellationToken::new();
        match self.caller.clients.ask(&question, FAREWELL, &never).await {
            Ok(answer) => {
                context.log(format_args!("the service was told to stop (DELETE); it answered {}", answer.status))
            }
            Err(why) => tracing::debug!(?why, url, "a service could not be told to stop"),
        }
    }

    async fn cancelled(&self, context: &ShardContext) -> bool {
        let look = self.caller.ledger.shards(context.attempt.execution, context.attempt.index, 1);
        match tokio::time::timeout(FAREWELL, look).await {
            Ok(Ok(shards)) => shards.first().is_some_and(|shard| shard.phase == Phase::Cancelled),
            _ => false,
        }
    }

    /// Where an earlier attempt left the service at work.
    fn asked_at(&self, context: &ShardContext) -> Option<String> {
        let Some(Checkpoint::Text(text)) = &context.checkpoint else { return None };
        let url = text.strip_prefix(ASKED_AT)?;
        // Of another version of the job, perhaps: nothing is sent elsewhere.
        (Origin::of(url).ok()? == Origin::of(&self.call.url).ok()?).then(|| url.to_owned())
    }

    fn headers(&self, context: &ShardContext) -> Result<HeaderMap, ShardError> {
        let mut headers = HeaderMap::new();
        for (name, source) in &self.call.headers {
            let unusable = || ShardError::permanent(format!("the header '{name}' can't be sent; look at its value"));
            let name = HeaderName::from_bytes(name.as_bytes()).map_err(|_| unusable())?;
            let mut value = match source {
                HeaderSource::Text(text) => HeaderValue::from_str(text),
                HeaderSource::Secret { from, prefix } => HeaderValue::from_str(&format!("{prefix}{}", secret(from)?)),
            }
            .map_err(|_| unusable())?;
            // Not shown by anything that prints headers.
            value.set_sensitive(matches!(source, HeaderSource::Secret { .. }));
            headers.insert(name, value);
        }
        let own = [
            ("content-type", "application/json".to_owned()),
            ("accept", "application/json, */*;q=0.5".to_owned()),
            ("idempotency-key", context.idempotency_key()),
            ("shardcron-attempt", context.attempt.attempt.to_string()),
        ];
        for (name, value) in own {
            let value = HeaderValue::from_str(&value).map_err(|e| ShardError::permanent(e.to_string()))?;
            headers.entry(name).or_insert(value);
        }
        Ok(headers)
    }
}

/// Whether the shard is to say what the others are.
fn maps(context: &ShardContext) -> bool {
    matches!(context.slice, ShardSlice::Map { .. })
}

/// Bytes of an answer that are read.
fn room(context: &ShardContext) -> usize {
    if maps(context) { EMITS_ANSWER_BYTES } else { HTTP_ANSWER_BYTES }
}

/// They become shards only with the end of this attempt.
async fn emit(context: &ShardContext, payloads: Vec<serde_json::Value>) -> Result<(), ShardError> {
    for payload in payloads {
        map::emit(context, payload).await?;
    }
    Ok(())
}

/// The same for every attempt: a service that remembers keys may compare what came with them. A service that reduces gets the results
/// of the sub-tasks, which have all ended and do not change any more.
async fn body(context: &ShardContext) -> Result<String, ShardError> {
    let mut input = input::of(context);
    if let Some(fields) = input.as_object_mut() {
        for of_the_attempt in ["attempt", "checkpoint", "time_left_ms"] {
            fields.remove(of_the_attempt);
        }
    }
    let mut text = input.to_string();
    if let ShardSlice::Reduce { .. } = context.slice {
        text.truncate(text.len() - 1);
        text.push_str(",\"results\":[");
        let mut results = map::Results::of(context, REDUCE_BODY_BYTES);
        while let Some(page) = results.page().await? {
            text.push_str(&page);
        }
        text.push_str("]}");
    }
    Ok(text)
}

fn secret(from: &SecretSource) -> Result<String, ShardError> {
    let missing = |why: &str| ShardError::transient(format!("the secret {from} can't be read at this worker: {why}"));
    let text = match from {
        SecretSource::Env(name) => std::env::var(name).map_err(|_| missing("it is not set"))?,
        SecretSource::File(path) => {
            let size = std::fs::metadata(path).map_err(|e| missing(&e.to_string()))?.len();
            if size > SECRET_BYTES {
                return Err(missing(&format!("the file has {size} bytes, {SECRET_BYTES} are possible")));
            }
            std::fs::read_to_string(path).map_err(|e| missing(&e.to_string()))?
        }
    };
    Ok(text.trim().to_owned())
}

/// What came first.
enum First<T> {
    /// The service's own word.
    Said(Said),
    /// What was done meanwhile.
    Done(T),
}

async fn first_of<T>(waiting: &mut Option<Waiting>, work: impl Future<Output = T>) -> First<T> {
    let Some(waiting) = waiting else { return First::Done(work.await) };
    tokio::select! {
        biased;
        said = waiting.said() => First::Said(said),
        done = work => First::Done(done),
    }
}

/// Waits, unless the attempt is told to stop or its time is over.
async fn pause(context: &ShardContext, wait: Duration) -> Result<(), ShardError> {
    let (wait, over) = match context.time_left() {
        Some(left) if left <= wait => (left, true),
        _ => (wait, false),
    };
    tokio::select! {
        biased;
        () = context.stop.cancelled() => Err(ShardError::stopped("told to stop")),
        () = tokio::time::sleep(wait) => if over { Err(ShardError::stopped("its time is over")) } else { Ok(()) },
    }
}

async fn keep_checkpoint(context: &mut ShardContext, text: String) -> Result<(), ShardError> {
    match context.advance(Checkpoint::Text(text), 0).await {
        // It costs another request at worst.
        Ok(()) | Err(CheckpointError::Unavailable(_)) => Ok(()),
        Err(superseded @ CheckpointError::Superseded(_)) => Err(ShardError::stopped(superseded.to_string())),
    }
}
