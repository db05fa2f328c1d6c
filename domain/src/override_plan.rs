//! Other shards than the job's, as a trigger may ask for: another number of them, or some of them only.

use crate::job::ShardsSpec;
use crate::limits::{SHARDS_MAX, SHARDS_PICKED};
use crate::plan::ShardPlan;
use crate::sharding::{FileSpec, QuerySpec};
use serde::{Deserialize, Serialize};

/// What a trigger wants of the shards.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShardsWanted {
    /// The job's data in this many shards.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub count: Option<u32>,
    /// These shards of the plan only, by their positions from 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub only: Option<Vec<u32>>,
}

impl ShardsWanted {
    /// The plan of an execution that is fired so.
    ///
    /// # Errors
    /// A sentence for the person who asked.
    pub fn plan(&self, spec: &ShardsSpec) -> Result<ShardPlan, String> {
        let wanted = self.over(spec)?;
        let whole = ShardPlan::from_spec(&wanted).map_err(|e| format!("shards{}: {}", e.key, e.message))?;
        match &self.only {
            None => Ok(whole),
            Some(_) if whole.is_later() => {
                Err("shards.only picks from a plan that is known beforehand; this job's is made when it \
                                              fires, from what is there then"
                    .into())
            }
            Some(_) if wanted.map.is_some() => {
                Err("shards.only picks from a plan; the shards of a map are there only once its first one has run"
                    .into())
            }
            Some(only) => pick(whole, only),
        }
    }

    /// The job's specification with the number of shards that is wanted.
    ///
    /// # Errors
    /// A sentence for the person who asked.
    pub fn over(&self, spec: &ShardsSpec) -> Result<ShardsSpec, String> {
        let spec = spec.clone();
        Ok(match self.count {
            None => spec,
            Some(0) => return Err("shards.count: 0 shards would do nothing; 1 is the least".into()),
            Some(n) if n > SHARDS_MAX => {
                return Err(format!("shards.count: {n} shards; {SHARDS_MAX} is the most"));
            }
            Some(n) if spec.modulo.is_some() => ShardsSpec { modulo: Some(n), count: None, ..spec },
            Some(n) if spec.slots.is_some() => ShardsSpec { slots: Some(n), count: None, ..spec },
            Some(n) => match (spec.file.clone(), spec.query.clone()) {
                (Some(file), _) => ShardsSpec { file: Some(FileSpec { count: Some(n), size: None, ..file }), ..spec },
                (_, Some(query)) => ShardsSpec { query: Some(QuerySpec { count: n, ..query }), ..spec },
                _ => ShardsSpec { count: Some(n), size: None, ..spec },
            },
        })
    }
}

fn pick(whole: ShardPlan, only: &[u32]) -> Result<ShardPlan, String> {
    if only.is_empty() {
        return Err("shards.only is empty; nothing would run. Name positions from 0, or leave it out for all".into());
    }
    if only.len() > SHARDS_PICKED {
        return Err(format!("shards.only names {} shards; {SHARDS_PICKED} are the most", only.len()));
    }
    let mut sorted = only.to_vec();
    sorted.sort_unstable();
    if let Some(twice) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(format!("shards.only names shard {} twice", twice[0]));
    }
    match sorted.last() {
        Some(last) if *last >= whole.count() => Err(format!(
            "shards.only names shard {last}; the plan has {} shards, 0 to {}",
            whole.count(),
            whole.count() - 1
        )),
        _ => Ok(ShardPlan::Picked { of: Box::new(whole), shards: sorted }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::RangeSpec;
    use crate::plan::ShardSlice;

    fn range() -> ShardsSpec {
        ShardsSpec { range: Some(RangeSpec { from: 1, to: 100 }), count: Some(10), ..ShardsSpec::default() }
    }

    fn wanted(count: Option<u32>, only: Option<&[u32]>) -> ShardsWanted {
        ShardsWanted { count, only: only.map(<[u32]>::to_vec) }
    }

    #[test]
    fn picked_shards_have_the_slices_of_the_whole_plan() {
        let whole = ShardPlan::from_spec(&range()).unwrap();
        let plan = wanted(None, Some(&[7, 2])).plan(&range()).unwrap();
        assert_eq!((plan.count(), plan.position(0), plan.position(1)), (2, (2, 10), (7, 10)));
        assert_eq!((plan.slice(0), plan.slice(1), plan.slice(2)), (whole.slice(2), whole.slice(7), None));
        let again: ShardPlan = serde_json::from_str(&serde_json::to_string(&plan).unwrap()).unwrap();
        assert_eq!(again, plan);
    }

    #[test]
    fn another_count_cuts_the_same_data() {
        let plan = wanted(Some(4), None).plan(&range()).unwrap();
        assert_eq!(plan.slice(3), Some(ShardSlice::Range { from: 76, to: 100 }));
        let modulo = ShardsSpec { modulo: Some(3), ..ShardsSpec::default() };
        assert_eq!(wanted(Some(5), None).plan(&modulo).unwrap(), ShardPlan::Modulo { total: 5 });
        let sized = ShardsSpec { size: Some(10), count: None, ..range() };
        assert_eq!(
            wanted(Some(2), Some(&[1])).plan(&sized).unwrap().slice(0),
            Some(ShardSlice::Range { from: 51, to: 100 })
        );
    }

    #[test]
    fn what_can_not_be_is_refused_in_a_sentence() {
        for (count, only, words) in [
            (Some(0), None, "0 shards"),
            (Some(101), None, "leave some empty"),
            (Some(SHARDS_MAX + 1), None, "is the most"),
            (None, Some(&[][..]), "is empty"),
            (None, Some(&[1, 1][..]), "twice"),
            (None, Some(&[10][..]), "0 to 9"),
        ] {
            let sentence = wanted(count, only).plan(&range()).unwrap_err();
            assert!(sentence.contains(words), "{sentence}");
        }
    }
}
