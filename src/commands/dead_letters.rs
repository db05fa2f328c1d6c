//! What is done with dead letters: show, replay, drop.

use super::operate::reopen;
use super::trigger::{send, wait_for_decision};
use super::{Misuse, now_ms, who};
use crate::output::{Out, instant, line, number, seconds};
use crate::wiring::Wired;
use anyhow::Result;
use serde::Serialize;
use serde_json::json;
use shardcron_domain::firing::request_key;
use shardcron_domain::limits::DEAD_BATCH;
use shardcron_domain::{ExecutionId, ShardRef, trigger};
use shardcron_store::{DeadQuery, DeadRow, DeadSettled, Reopen, ReopenShards};
use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::Duration;

/// Letters that one command takes up at most; another one takes the rest.
const MOST: usize = 10_000;
/// Attempts of a shard that are shown.
const ATTEMPTS: usize = 100;

/// Which letters are meant, and whether each was named.
pub(super) struct Choice {
    pub(super) named: bool,
    pub(super) query: DeadQuery,
}

/// The letters that are meant, oldest first. One that was named alone and is not there is a mistake.
pub(super) async fn chosen(wired: &Wired, choice: Choice) -> Result<Vec<DeadRow>> {
    let mut query = choice.query;
    let mut found: Vec<DeadRow> = Vec::new();
    while found.len() < MOST {
        let page = wired.ports.ledger.dead_letters(&query, DEAD_BATCH).await?;
        let full = page.len() == DEAD_BATCH;
        query.after = page.last().map(|letter| letter.id).or(query.after);
        found.extend(page);
        if !full {
            break;
        }
    }
    let missing = |id: &&(i64, i64)| id.0 == id.1 && !found.iter().any(|letter| letter.id == id.0);
    if let (true, Some((id, _))) = (choice.named, query.ids.iter().find(missing)) {
        return Err(no_such(*id).into());
    }
    Ok(found)
}

fn no_such(id: i64) -> Misuse {
    Misuse(format!(
        "there is no dead letter {id}; 'shardcron dead list' shows them (those of a retried shard are settled)"
    ))
}

/// Everything about one.
pub(super) async fn show(wired: &Wired, id: i64, out: Out) -> Result<ExitCode> {
    let query = DeadQuery { ids: vec![(id, id)], ..DeadQuery::default() };
    let Some(letter) = wired.ports.ledger.dead_letters(&query, 1).await?.pop() else { return Err(no_such(id).into()) };
    let attempts = match letter.shard {
        Some((execution, index)) => wired.ports.ledger.attempts_of(ShardRef { execution, index }, ATTEMPTS).await?,
        None => Vec::new(),
    };
    out.answer(&json!({ "letter": letter, "attempts": attempts }), || {
        line(&format!("dead letter  {}", letter.id));
        line(&format!("what         {}", letter.kind));
        line(&format!("since        {}", instant(Some(letter.at_ms))));
        if let Some(job) = &letter.job {
            line(&format!("job          {job}"));
        }
        if let Some((execution, index)) = letter.shard {
            line(&format!("shard        {execution}/{index}"));
        }
        line(&format!("why          {}", indented(&letter.reason)));
        if let Some(text) = &letter.text {
            line(&format!("message      {}", indented(text)));
        }
        for attempt in &attempts {
            line("");
            let took = seconds(attempt.ended_ms - attempt.started_ms);
            let (number, owner) = (attempt.attempt, attempt.owner);
            line(&format!(
                "attempt {number}: {} at {} after {took}, worker {owner}",
                attempt.outcome,
                instant(Some(attempt.ended_ms))
            ));
            if let Some(message) = &attempt.message {
                line(&format!("             {}", indented(message)));
            }
        }
        line("");
        line(&format!(
            "Try again with: shardcron dead replay {id}{}",
            if letter.shard.is_none() { " [--body JSON]" } else { "" }
        ));
    });
    Ok(ExitCode::SUCCESS)
}

/// Further lines stand under the first; what would disturb a terminal is left out.
fn indented(text: &str) -> String {
    let clean: String = text.chars().filter(|c| *c == '\n' || *c == '\t' || !c.is_control()).collect();
    clean.trim_end().replace('\n', "\n             ")
}

/// What became of one letter.
#[derive(Serialize)]
struct Replayed {
    id: i64,
    /// `running`, `fired`, `sent`, or the word of a decision; `refused`: the letter stays.
    outcome: String,
    execution: Option<ExecutionId>,
    message: String,
}

impl Replayed {
    fn refused(id: i64, message: impl Into<String>) -> Self {
        Replayed { id, outcome: "refused".into(), execution: None, message: message.into() }
    }
}

/// Tries all of them again, and says of each what became of it.
pub(super) async fn replay_all(
    wired: &Wired,
    letters: Vec<DeadRow>,
    (body, reason, patience): (Option<String>, Option<String>, u64),
    out: Out,
) -> Result<ExitCode> {
    if body.is_some() && (letters.len() != 1 || letters[0].shard.is_some()) {
        return Err(Misuse("--body goes with one message".into()).into());
    }
    let mut done = Vec::with_capacity(letters.len());
    let mut shards: BTreeMap<ExecutionId, Vec<(i64, u32)>> = BTreeMap::new();
    for letter in &letters {
        match letter.shard {
            Some((execution, index)) => shards.entry(execution).or_default().push((letter.id, index)),
            None => done.push(replay_message(wired, letter, body.as_deref(), (reason.as_deref(), patience)).await?),
        }
    }
    for (execution, of) in shards {
        replay_shards(wired, (execution, &of), reason.as_deref(), &mut done).await?;
    }
    done.sort_by_key(|letter| letter.id);
    let refused = done.iter().filter(|letter| letter.outcome == "refused").count();
    out.answer(&done, || {
        if done.is_empty() {
            line("nothing is dead");
        }
        for letter in &done {
            line(&format!("{}: {}: {}", letter.id, letter.outcome, letter.message));
        }
    });
    Ok(if refused == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

async fn replay_shards(
    wired: &Wired,
    (execution, of): (ExecutionId, &[(i64, u32)]),
    reason: Option<&str>,
    done: &mut Vec<Replayed>,
) -> Result<()> {
    for some in of.chunks(DEAD_BATCH) {
        let shards = ReopenShards::These(some.iter().map(|(_, index)| *index).collect());
        let wanted = Reopen { execution, shards, who: who(), reason: reason.map(str::to_owned) };
        let answer = reopen(wired, wanted).await?;
        done.extend(some.iter().map(|(id, index)| match &answer {
            Ok(_) => Replayed {
                id: *id,
                outcome: "running".into(),
                execution: Some(execution),
                message: format!("shard {index} of execution {execution} runs again"),
            },
            Err(refused) => Replayed::refused(*id, refused.to_string()),
        }));
    }
    Ok(())
}

/// Sends a message as a trigger; once that has it, the letter is settled. Should this process die between the two, the same request id
/// makes one firing of both.
async fn replay_message(
    wired: &Wired,
    letter: &DeadRow,
    body: Option<&str>,
    (reason, patience): (Option<&str>, u64),
) -> Result<Replayed> {
    let id = letter.id;
    let text = body.or(letter.text.as_deref()).unwrap_or_default();
    let mut request = match trigger::parse(text.as_bytes(), None) {
        Ok(request) => request,
        Err(e) => return Ok(Replayed::refused(id, format!("{e} (another text can be given with --body)"))),
    };
    let Some(job) = wired.ports.ledger.job(&request.job).await? else {
        let jobs = wired.ports.ledger.jobs().await?;
        let sentence = trigger::unknown_job(&request.job, jobs.iter().map(|job| job.name.as_str()));
        return Ok(Replayed::refused(id, format!("{sentence} (another text can be given with --body)")));
    };
    let request_id = request.request_id.get_or_insert_with(|| format!("dead-letter-{id}")).clone();
    request.by.get_or_insert_with(who);
    let backfill = request.backfill.is_some();
    let patience = Duration::from_secs(patience);
    send(wired, &request, patience.max(Duration::from_secs(1))).await?;
    let why = format!("sent again as request {request_id} of job '{}'{}", request.job, words(reason));
    settle(wired, vec![id], ("dead_replay", &why)).await?;
    let decision =
        if backfill { None } else { wait_for_decision(wired, job.id, &request_key(&request_id), patience).await? };
    Ok(match decision {
        Some(decision) => Replayed {
            id,
            outcome: decision.kind.word().into(),
            execution: decision.execution,
            message: match (decision.execution, decision.reason) {
                (Some(execution), None) => format!("job '{}', execution {execution}", request.job),
                (_, reason) => reason.unwrap_or_else(|| format!("job '{}'", request.job)),
            },
        },
        None => Replayed {
            id,
            outcome: "sent".into(),
            execution: None,
            message: format!("{why}; no scheduler has decided about it yet"),
        },
    })
}

fn words(reason: Option<&str>) -> String {
    reason.map(|text| format!(": {text}")).unwrap_or_default()
}

async fn settle(wired: &Wired, ids: Vec<i64>, (action, why): (&'static str, &str)) -> Result<Vec<i64>> {
    let settled = DeadSettled { ids, action, who: who(), why: why.to_owned() };
    Ok(wired.ports.ledger.settle_dead(&settled, now_ms()).await?)
}

/// Takes them away.
pub(super) async fn drop_all(wired: &Wired, letters: Vec<DeadRow>, reason: String, out: Out) -> Result<ExitCode> {
    let mut dropped = Vec::new();
    for some in letters.chunks(DEAD_BATCH) {
        let ids = some.iter().map(|letter| letter.id).collect();
        dropped.extend(settle(wired, ids, ("dead_drop", &reason)).await?);
    }
    out.answer(&json!({ "dropped": dropped }), || {
        line(&format!("dropped {} dead letters", number(dropped.len() as u64)));
    });
    Ok(ExitCode::SUCCESS)
}
