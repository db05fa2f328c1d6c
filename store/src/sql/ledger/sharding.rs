//! The port of plans that are made at a firing and of shards that a shard makes.

use super::too_many;
use crate::error::Result;
use crate::rows::{AttemptOutcome, Ended, Recorded};
use crate::sharding_port::{Growth, ShardingLedger, SubResult};
use crate::sql::SqlLedger;
use crate::sql::fault::{Fault, with_retries};
use async_trait::async_trait;
use shardcron_domain::limits::{EMITTED_MAX, EMITTED_PER_WRITE};
use shardcron_domain::planning::{KeyBounds, LastRun};
use shardcron_domain::shard::Rejection;
use shardcron_domain::sharding::QuerySpec;
use shardcron_domain::{AttemptRef, Epoch, ExecutionId, Incarnation, JobId};

#[async_trait]
impl ShardingLedger for SqlLedger {
    async fn key_bounds(&self, query: &QuerySpec) -> Result<KeyBounds> {
        with_retries!(self.read_key_bounds(query))
    }

    async fn last_run(&self, job: JobId) -> Result<Option<LastRun>> {
        with_retries!(self.read_last_run(job))
    }

    async fn emit(
        &self,
        owner: Incarnation,
        attempt: AttemptRef,
        from: u32,
        payloads: &[String],
    ) -> Result<std::result::Result<(), Rejection>> {
        if payloads.len() > EMITTED_PER_WRITE {
            return Err(too_many("emitted shards", payloads.len(), EMITTED_PER_WRITE));
        }
        if payloads.is_empty() {
            return Ok(Ok(()));
        }
        with_retries!(self.write_emitted(owner, attempt, from, payloads))
    }

    async fn finish_map(
        &self,
        owner: Incarnation,
        ended: &Ended,
        growth: Growth,
        now_ms: i64,
    ) -> Result<std::result::Result<Recorded, Rejection>> {
        if !matches!(ended.outcome, AttemptOutcome::Success { .. }) || growth.emitted > EMITTED_MAX {
            return Err(
                Fault::invalid("only a good end makes an execution grow, and not beyond its bound").into_store_error()
            );
        }
        with_retries!(self.write_map_end(owner, ended, growth, now_ms))
    }

    async fn emitted(&self, execution: ExecutionId, index: u32) -> Result<Option<String>> {
        with_retries!(self.read_emitted(execution, index))
    }

    async fn emitted_count(&self, execution: ExecutionId) -> Result<u32> {
        with_retries!(self.count_emitted(execution))
    }

    async fn addressed(&self, who: Incarnation, now_ms: i64, limit: usize) -> Result<Vec<(String, AttemptRef)>> {
        with_retries!(self.read_addressed(who, now_ms, limit))
    }

    async fn addressees(&self) -> Result<Vec<Incarnation>> {
        with_retries!(self.read_addressees())
    }

    async fn abandon(&self, epoch: Epoch, who: Incarnation, now_ms: i64) -> Result<Vec<AttemptRef>> {
        with_retries!(self.write_abandoned(epoch, who, now_ms))
    }

    async fn sub_results(&self, execution: ExecutionId, from: u32, limit: usize) -> Result<Vec<SubResult>> {
        with_retries!(self.read_sub_results(execution, from, limit))
    }
}
