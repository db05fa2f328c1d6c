//! The last look at what handlers wrote, told and emitted, in the ledger's own rows.

use super::jobs::Work;
use super::oracle::Checked;
use super::{Broken, World};
use shardcron_domain::{ExecutionId, JobId};
use shardcron_store::{ShardingLedger as _, SqlArg, StoreError};
use std::collections::BTreeMap;

fn whole(row: &[SqlArg], column: usize) -> i64 {
    match row.get(column) {
        Some(SqlArg::Int(n)) => *n,
        _ => -1,
    }
}

pub(super) fn effects(world: &World, jobs: &[JobId], id: ExecutionId) -> Checked {
    let fault = |e: StoreError| Broken::Rules(format!("the effects can't be read: {e}"));
    let sql = world.sql();
    let Some((job, map, shards)) = world.oracle(|o| o.shape(id)) else { return Ok(()) };
    for index in (0..shards).filter(|_| map) {
        let kept = world.real(sql.emitted(id, index)).map_err(fault)?;
        world.oracle(|o| o.check_emitted(id, index, kept.as_deref()))?;
    }
    match jobs.iter().position(|of| *of == job).map(|n| world.plan.jobs[n].work) {
        Some(Work::Once) => world.oracle(|o| o.check_told(id)),
        Some(Work::Transactions) => {
            let select = "SELECT shard_index, record, COUNT(*) FROM sim_effects WHERE execution_id = ? GROUP BY shard_index, record";
            let rows = world.real(sql.query(select, &[SqlArg::Text(id.to_string())])).map_err(fault)?;
            let of =
                |row: &Vec<SqlArg>| ((u32::try_from(whole(row, 0)).unwrap_or(u32::MAX), whole(row, 1)), whole(row, 2));
            let counts: BTreeMap<(u32, i64), i64> = rows.iter().map(of).collect();
            world.oracle(|o| o.check_written(id, &counts))
        }
        _ => Ok(()),
    }
}
