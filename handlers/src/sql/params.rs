//! What a parameter's name stands for in one step of one attempt. Values are bound by the database's driver, never pasted.

use super::tokens::{SqlTemplate, Statement};
use serde_json::Value;
use shardcron_domain::trigger::suggest;
use shardcron_sdk::{ShardContext, ShardSlice};
use shardcron_store::{BoundSql, SqlArg};

/// In front of a job's own parameter where its name is also one of Shardcron's.
const OWN: &str = "param_";

/// The values that a step may use.
pub(crate) struct Values<'a> {
    context: &'a ShardContext,
    /// The keys of this step, if the shard has a range.
    range: Option<(i64, i64)>,
}

impl<'a> Values<'a> {
    /// The values of a step; of a range slice the step may have a part only.
    pub(crate) fn new(context: &'a ShardContext, part: Option<(i64, i64)>) -> Self {
        let range = match context.slice {
            ShardSlice::Range { from, to } => Some(part.unwrap_or((from, to))),
            _ => None,
        };
        Values { context, range }
    }

    /// Binds all statements.
    ///
    /// # Errors
    /// The first name that stands for nothing, with those that do; or a value that no column can hold.
    pub(crate) fn bind(&self, template: &SqlTemplate) -> Result<Vec<BoundSql>, String> {
        template.statements.iter().map(|statement| self.bind_one(statement)).collect()
    }

    fn bind_one(&self, statement: &Statement) -> Result<BoundSql, String> {
        let args = statement.names.iter().map(|name| self.value(name)).collect::<Result<_, _>>()?;
        Ok(BoundSql { text: statement.text.clone(), args })
    }

    fn value(&self, name: &str) -> Result<SqlArg, String> {
        if let Some((_, value)) = self.built_in().into_iter().find(|(known, _)| *known == name) {
            return Ok(value);
        }
        let params = &self.context.params;
        let own = name.strip_prefix(OWN).and_then(|short| params.get(short));
        match own.or_else(|| params.get(name)) {
            Some(value) => sql_value(name, value),
            None => Err(self.unknown(name)),
        }
    }

    fn built_in(&self) -> Vec<(&'static str, SqlArg)> {
        let context = self.context;
        let attempt = context.attempt;
        let mut all = vec![
            ("shard_index", SqlArg::Int(self.context.shard_index.into())),
            ("shards_total", SqlArg::Int(context.shards_total.into())),
            ("execution", SqlArg::Text(attempt.execution.to_string())),
            ("attempt", SqlArg::Int(attempt.attempt.into())),
            ("idempotency_key", SqlArg::Text(context.idempotency_key())),
            ("nominal_ms", SqlArg::Int(context.nominal_ms)),
            ("job", SqlArg::Text(context.job.clone())),
        ];
        if let Some((from, to)) = self.range {
            all.extend([("shard_from", SqlArg::Int(from)), ("shard_to", SqlArg::Int(to))]);
        }
        match &context.slice {
            ShardSlice::Range { .. } => {}
            ShardSlice::Modulo { total, item } => {
                all.push(("modulo_total", SqlArg::Int((*total).into())));
                all.push(("modulo_item", SqlArg::Int((*item).into())));
            }
            ShardSlice::List { items } => {
                all.push(("items", SqlArg::Text(Value::from(items.clone()).to_string())));
                all.extend([("item_part", SqlArg::Int(0)), ("item_parts", SqlArg::Int(1))]);
                if let [only] = items.as_slice() {
                    all.push(("item", SqlArg::Text(only.clone())));
                }
            }
            ShardSlice::Part { item, part, parts } => {
                all.push(("items", SqlArg::Text(Value::from(vec![item.clone()]).to_string())));
                all.push(("item", SqlArg::Text(item.clone())));
                all.extend([("item_part", SqlArg::Int((*part).into())), ("item_parts", SqlArg::Int((*parts).into()))]);
            }
            ShardSlice::Slots { from, to } => {
                all.extend([("slot_from", SqlArg::Int((*from).into())), ("slot_to", SqlArg::Int((*to).into()))]);
            }
            ShardSlice::Keys { from, before } => {
                all.push(("key_from", SqlArg::Text(from.clone())));
                all.push(("key_before", before.clone().map_or(SqlArg::Null, SqlArg::Text)));
            }
            ShardSlice::Worker { worker } => {
                all.push(("worker", SqlArg::Text(worker.name.clone())));
            }
            // A job with these has no sql handler: its specification is refused.
            ShardSlice::File { .. } | ShardSlice::Map { .. } | ShardSlice::Task { .. } | ShardSlice::Reduce { .. } => {}
        }
        all
    }

    fn unknown(&self, name: &str) -> String {
        let mut known: Vec<String> = self.built_in().iter().map(|(name, _)| (*name).to_owned()).collect();
        known.extend(self.context.params.keys().cloned());
        let hint = match suggest(name, known.iter().map(String::as_str)) {
            Some(near) => format!(" (did you mean ':{near}'?)"),
            None => String::new(),
        };
        format!("the sql names ':{name}', which this shard does not have{hint}. It has: :{}", known.join(", :"))
    }
}

fn sql_value(name: &str, value: &Value) -> Result<SqlArg, String> {
    Ok(match value {
        Value::Null => SqlArg::Null,
        Value::Bool(yes) => SqlArg::Int((*yes).into()),
        Value::String(text) => SqlArg::Text(text.clone()),
        Value::Number(number) => match (number.as_i64(), number.as_u64(), number.as_f64()) {
            (Some(whole), _, _) => SqlArg::Int(whole),
            // As a fraction it would silently lose its last digits.
            (None, Some(huge), _) => {
                return Err(format!(
                    "the parameter '{name}' is {huge}, beyond the largest whole number; give it as a text"
                ));
            }
            (None, None, Some(fraction)) => SqlArg::Float(fraction),
            (None, None, None) => {
                return Err(format!("the parameter '{name}' is a number that no column can hold: {number}"));
            }
        },
        // For JSON_TABLE and json_each.
        structured @ (Value::Array(_) | Value::Object(_)) => SqlArg::Text(structured.to_string()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use shardcron_sdk::testing::TestContext;

    fn bind(test: &TestContext, sql: &str) -> Result<Vec<SqlArg>, String> {
        let template = SqlTemplate::parse(sql).unwrap();
        let context = test.context();
        Ok(Values::new(&context, None).bind(&template)?.into_iter().flat_map(|s| s.args).collect())
    }

    fn text(value: &str) -> SqlArg {
        SqlArg::Text(value.into())
    }

    #[test]
    fn a_range_and_what_every_shard_has() {
        let test = TestContext::new(ShardSlice::Range { from: -3, to: 9 });
        let args =
            bind(&test, "SELECT :shard_from, :shard_to, :shard_index, :shards_total, :attempt, :nominal_ms, :job")
                .unwrap();
        assert_eq!(args[..2], [SqlArg::Int(-3), SqlArg::Int(9)]);
        assert_eq!(args[2..6], [SqlArg::Int(0), SqlArg::Int(1), SqlArg::Int(1), SqlArg::Int(0)]);
        assert_eq!(args[6], text("test"));
        let keys = bind(&test, "SELECT :execution, :idempotency_key").unwrap();
        let execution = "00000000-0000-0000-0000-000000000001";
        assert_eq!(keys, [text(execution), text(&format!("{execution}/0"))]);
    }

    #[test]
    fn other_slices() {
        let modulo = TestContext::new(ShardSlice::Modulo { total: 8, item: 3 });
        assert_eq!(bind(&modulo, "SELECT :modulo_total, :modulo_item").unwrap(), [SqlArg::Int(8), SqlArg::Int(3)]);
        let list = TestContext::new(ShardSlice::List { items: vec!["a\"b".into(), "c".into()] });
        assert_eq!(bind(&list, "SELECT :items").unwrap(), [text(r#"["a\"b","c"]"#)]);
        assert!(bind(&list, "SELECT :item").is_err(), "two items are not one");
        let single = TestContext::new(ShardSlice::List { items: vec!["EWR".into()] });
        assert_eq!(bind(&single, "SELECT :item").unwrap(), [text("EWR")]);
        let part = TestContext::new(ShardSlice::Part { item: "AA".into(), part: 2, parts: 7 });
        let names = "SELECT :item, :items, :item_part, :item_parts";
        let of_part = [text("AA"), text(r#"["AA"]"#), SqlArg::Int(2), SqlArg::Int(7)];
        assert_eq!(bind(&part, names).unwrap(), of_part);
        let whole = [text("EWR"), text(r#"["EWR"]"#), SqlArg::Int(0), SqlArg::Int(1)];
        assert_eq!(bind(&single, names).unwrap(), whole);
        let slots = TestContext::new(ShardSlice::Slots { from: 0, to: 63 });
        assert_eq!(bind(&slots, "SELECT :slot_from, :slot_to").unwrap(), [SqlArg::Int(0), SqlArg::Int(63)]);
        let keys = |before: Option<&str>| {
            TestContext::new(ShardSlice::Keys { from: "a".into(), before: before.map(Into::into) })
        };
        assert_eq!(bind(&keys(Some("m")), "SELECT :key_from, :key_before").unwrap(), [text("a"), text("m")]);
        assert_eq!(bind(&keys(None), "SELECT :key_before").unwrap(), [SqlArg::Null]);
    }

    #[test]
    fn z_03_parameters_are_bound_as_they_are() {
        let evil = "'; DROP TABLE t; -- :shard_from ?";
        let test = TestContext::new(ShardSlice::Modulo { total: 1, item: 0 })
            .param("date", evil)
            .param("limit", 2.5)
            .param("on", true)
            .param("none", Value::Null)
            .param("attempt", "mine")
            .param("nested", json!({"a": [1]}))
            .param("huge", u64::MAX);
        let args =
            bind(&test, "SELECT :date, :param_date, :limit, :on, :none, :attempt, :param_attempt, :nested").unwrap();
        assert_eq!(args[..3], [text(evil), text(evil), SqlArg::Float(2.5)]);
        assert_eq!(args[3..5], [SqlArg::Int(1), SqlArg::Null]);
        assert_eq!(args[5..], [SqlArg::Int(1), text("mine"), text("{\"a\":[1]}")]);
        assert!(bind(&test, "SELECT :huge").unwrap_err().contains("as a text"));
    }

    #[test]
    fn an_unknown_name_says_what_there_is() {
        let test = TestContext::new(ShardSlice::Range { from: 1, to: 2 }).param("date", "x");
        let error = bind(&test, "SELECT :shard_form").unwrap_err();
        assert!(error.contains("':shard_form'") && error.contains("did you mean ':shard_from'?"), "{error}");
        assert!(error.contains(":date") && error.contains(":idempotency_key"), "{error}");
        let modulo = TestContext::new(ShardSlice::Modulo { total: 1, item: 0 });
        assert!(bind(&modulo, "SELECT :shard_from").unwrap_err().contains(":modulo_item"));
    }
}
