//! XXL-JOB's table `xxl_job_info`, out of a MySQL dump (versions 2.0 to 3.x).

use super::dump::{self, Row};
use super::{Imported, Names, comment, key, quartz, quoted, refusal};
use crate::schedule::ScheduleSpec;
use std::collections::BTreeMap;

const HEAD: &str = "From XXL-JOB's xxl_job_info. Handlers of XXL-JOB are Java classes or scripts on its executors: a BEAN became
handler = { rust = \"its name\" }, for which a worker has to register a handler of that name; write exec instead for a program.";

/// Makes a job file of a dump. XXL-JOB reads patterns in the zone of its server, which the dump does not say.
///
/// # Errors
/// The line of the dump and what could not be read there, or that the table is not in it.
pub fn xxl_job(dump: &str, zone: Option<&str>) -> Result<Imported, String> {
    let mut rows = dump::rows(dump, "xxl_job_info")?;
    rows.sort_by_key(|row| number(row, "id"));
    let groups = dump::rows(dump, "xxl_job_group").unwrap_or_default();
    let mut imported = Imported::default();
    comment(&mut imported.text, HEAD);
    let mut names = Names::default();
    let name_of: Vec<(i64, String)> =
        rows.iter().map(|row| (number(row, "id"), names.take(&wanted_name(row), "xxl-job"))).collect();
    let parents = parents(&rows, &name_of);
    for (row, (id, name)) in rows.iter().zip(&name_of) {
        let mut job = Job { row, zone, keys: String::new(), remarks: Vec::new(), name, left_out: Vec::new() };
        let none = Vec::new();
        job.describe(*id, &groups);
        job.build(parents.get(id).unwrap_or(&none), &names);
        imported.left_out.extend(job.left_out.iter().map(|why| format!("job {id} ('{name}'): {why}")));
        imported.text.push('\n');
        for remark in &job.remarks {
            comment(&mut imported.text, remark);
        }
        for why in &job.left_out {
            comment(&mut imported.text, &format!("Not carried over: {why}"));
        }
        imported.text.push_str(&format!("[job.{}]\n{}", quoted(name), job.keys));
        imported.jobs += 1;
    }
    Ok(imported)
}

fn text<'r>(row: &'r Row, column: &str) -> &'r str {
    row.get(column).map_or("", |value| value.trim())
}

fn number(row: &Row, column: &str) -> i64 {
    text(row, column).parse().unwrap_or(0)
}

fn wanted_name(row: &Row) -> String {
    let candidates = [text(row, "executor_handler"), text(row, "job_desc")];
    let usable = candidates.into_iter().find(|text| text.chars().any(|c| c.is_ascii_alphanumeric()));
    usable.map_or_else(|| format!("xxl-job-{}", number(row, "id")), str::to_owned)
}

/// Which jobs name a job as their child: by the child's number.
fn parents(rows: &[Row], name_of: &[(i64, String)]) -> BTreeMap<i64, Vec<String>> {
    let mut parents: BTreeMap<i64, Vec<String>> = BTreeMap::new();
    for (row, (id, name)) in rows.iter().zip(name_of) {
        for child in text(row, "child_jobid").split(',').filter_map(|child| child.trim().parse::<i64>().ok()) {
            if child != *id {
                parents.entry(child).or_default().push(name.clone());
            }
        }
    }
    parents
}

struct Job<'r> {
    row: &'r Row,
    zone: Option<&'r str>,
    name: &'r str,
    keys: String,
    remarks: Vec<String>,
    left_out: Vec<String>,
}

impl Job<'_> {
    fn describe(&mut self, id: i64, groups: &[Row]) {
        let row = self.row;
        let group = groups.iter().find(|group| number(group, "id") == number(row, "job_group"));
        let group = group.map(|group| text(group, "app_name")).filter(|app| !app.is_empty());
        let group =
            group.map_or_else(|| format!("group {}", number(row, "job_group")), |app| format!("executor {app}"));
        self.remarks.push(format!("XXL-JOB {id}: {}; {group}, author {}", text(row, "job_desc"), text(row, "author")));
        if !text(row, "alarm_email").is_empty() {
            self.remarks.push(format!("Alarms went to {}.", text(row, "alarm_email")));
        }
        if text(row, "trigger_status") == "0" {
            self.remarks.push(format!("It was stopped. After applying: shardcron jobs pause {}", self.name));
        }
    }

    fn build(&mut self, parents: &[String], _: &Names) {
        self.schedule();
        self.handler();
        self.policies();
        if !parents.is_empty() {
            let list: Vec<String> = parents.iter().map(|name| quoted(name)).collect();
            self.supported("after", &format!("[{}]", list.join(", ")), "child of", &parents.join(", "));
        }
        let param = text(self.row, "executor_param");
        if !param.is_empty() {
            key(&mut self.keys, "params", &format!("{{ param = {} }}", quoted(param)));
        }
    }

    /// A key that this version may not know yet: then a remark.
    fn supported(&mut self, name: &str, value: &str, what: &str, original: &str) {
        match refusal(&format!("{name} = {value}")) {
            None => key(&mut self.keys, name, value),
            Some(why) => self.left_out.push(format!("{what} {original}: {why}")),
        }
    }

    fn schedule(&mut self) {
        let row = self.row;
        // Up to 2.2 there were patterns only, in another column.
        let old = text(row, "job_cron");
        let (kind, conf) = match text(row, "schedule_type") {
            "" if !old.is_empty() => ("CRON", old),
            kind => (kind, text(row, "schedule_conf")),
        };
        let schedule = match kind {
            "CRON" => self.cron(conf),
            "FIX_RATE" => seconds(conf).map(|seconds| format!("every = \"{seconds}s\"")),
            "FIX_DELAY" => seconds(conf).map(|seconds| format!("delay = \"{seconds}s\"")),
            "NONE" | "" => return,
            other => Err(format!("schedule type {other} is not known")),
        };
        match schedule.and_then(|keys| match refusal(&format!("schedule = {{ {keys} }}")) {
            None => Ok(keys),
            Some(why) => Err(why),
        }) {
            Ok(keys) => key(&mut self.keys, "schedule", &format!("{{ {keys} }}")),
            Err(why) => self.left_out.push(format!("its schedule '{conf}', so that it is fired by hand: {why}")),
        }
    }

    fn cron(&mut self, conf: &str) -> Result<String, String> {
        let pattern = quartz::convert(conf)?;
        let spec = ScheduleSpec { cron: Some(pattern.clone()), ..ScheduleSpec::default() };
        spec.compile().map_err(|e| e.to_string())?;
        self.remarks.push(format!("Pattern in Quartz's words: {conf}"));
        Ok(match self.zone {
            Some(zone) => format!("cron = {}, timezone = {}", quoted(&pattern), quoted(zone)),
            None => {
                self.remarks.push("XXL-JOB read it in the zone of its server; here it is UTC.".into());
                format!("cron = {}", quoted(&pattern))
            }
        })
    }

    fn handler(&mut self) {
        let (kind, source) = (text(self.row, "glue_type"), self.row.get("glue_source").map_or("", String::as_str));
        let source = source.replace("\r\n", "\n");
        let param = text(self.row, "executor_param");
        let interpreter: &[&str] = match kind {
            "GLUE_SHELL" => &["sh", "-c"],
            "GLUE_PYTHON" => &["python3", "-c"],
            "GLUE_PYTHON2" => &["python2", "-c"],
            "GLUE_PHP" => &["php", "-r"],
            "GLUE_NODEJS" => &["node", "-e"],
            "GLUE_POWERSHELL" => &["pwsh", "-Command"],
            _ => &[],
        };
        if !interpreter.is_empty() && !source.is_empty() {
            // The script's first argument was the parameter; sh takes its own name first.
            let mut argv: Vec<&str> = interpreter.to_vec();
            argv.push(&source);
            argv.extend((kind == "GLUE_SHELL").then_some(self.name));
            argv.push(param);
            let argv: Vec<String> = argv.into_iter().map(quoted).collect();
            self.remarks.push(
                "Its script had the shard's index and their number as second and third argument; here they are \
                 the variables SHARDCRON_SHARD_INDEX and SHARDCRON_SHARDS_TOTAL."
                    .into(),
            );
            return key(&mut self.keys, "handler", &format!("{{ exec = [{}] }}", argv.join(", ")));
        }
        let name = Some(text(self.row, "executor_handler")).filter(|name| !name.is_empty()).unwrap_or(self.name);
        if kind != "BEAN" && !kind.is_empty() {
            self.left_out.push(format!(
                "its source of type {kind}: rewrite it as a handler named '{name}', or as a program for exec"
            ));
        }
        key(&mut self.keys, "handler", &format!("{{ rust = {} }}", quoted(name)));
    }

    fn policies(&mut self) {
        let row = self.row;
        match text(row, "misfire_strategy") {
            "FIRE_ONCE_NOW" => key(&mut self.keys, "misfire", "{ policy = \"fire_once\" }"),
            // The column's default, and what versions without it did.
            "DO_NOTHING" | "" => key(&mut self.keys, "misfire", "{ policy = \"skip\" }"),
            other => self.left_out.push(format!("misfire strategy {other} is not known")),
        }
        match text(row, "executor_block_strategy") {
            "DISCARD_LATER" => key(&mut self.keys, "overlap", "\"skip\""),
            "SERIAL_EXECUTION" | "" => self.supported("overlap", "\"queue\"", "block strategy", "SERIAL_EXECUTION"),
            "COVER_EARLY" => self.supported("overlap", "\"cancel_running\"", "block strategy", "COVER_EARLY"),
            other => self.left_out.push(format!("block strategy {other} is not known")),
        }
        let timeout = number(row, "executor_timeout");
        let timeout = if timeout > 0 { format!("\"{timeout}s\"") } else { "\"none\"".into() };
        self.supported("timeout", &timeout, "timeout", text(row, "executor_timeout"));
        let attempts = number(row, "executor_fail_retry_count").max(0).saturating_add(1);
        let retry = format!("{{ attempts = {attempts} }}");
        self.supported("retry", &retry, "retries", text(row, "executor_fail_retry_count"));
        if text(row, "executor_route_strategy") == "SHARDING_BROADCAST" {
            self.left_out.push(
                "route strategy SHARDING_BROADCAST, one shard on each executor: give it shards = { modulo = N }".into(),
            );
        }
    }
}

fn seconds(conf: &str) -> Result<u32, String> {
    conf.parse().ok().filter(|seconds| *seconds > 0).ok_or_else(|| format!("'{conf}' is no number of seconds"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::{HandlerSpec, JobSpec, Misfire, Timeout};
    use crate::jobfile;
    use crate::units::Span;

    const TABLE: &str = "CREATE TABLE `xxl_job_info` (
  `id` int(11) NOT NULL AUTO_INCREMENT,
  `job_group` int(11) NOT NULL COMMENT '执行器主键ID',
  `job_desc` varchar(255) NOT NULL,
  `add_time` datetime DEFAULT NULL,
  `update_time` datetime DEFAULT NULL,
  `author` varchar(64) DEFAULT NULL COMMENT '作者',
  `alarm_email` varchar(255) DEFAULT NULL,
  `schedule_type` varchar(50) NOT NULL DEFAULT 'NONE',
  `schedule_conf` varchar(128) DEFAULT NULL,
  `misfire_strategy` varchar(50) NOT NULL DEFAULT 'DO_NOTHING',
  `executor_route_strategy` varchar(50) DEFAULT NULL,
  `executor_handler` varchar(255) DEFAULT NULL,
  `executor_param` varchar(512) DEFAULT NULL,
  `executor_block_strategy` varchar(50) DEFAULT NULL,
  `executor_timeout` int(11) NOT NULL DEFAULT '0',
  `executor_fail_retry_count` int(11) NOT NULL DEFAULT '0',
  `glue_type` varchar(50) NOT NULL,
  `glue_source` mediumtext,
  `glue_remark` varchar(128) DEFAULT NULL,
  `glue_updatetime` datetime DEFAULT NULL,
  `child_jobid` varchar(255) DEFAULT NULL,
  `trigger_status` tinyint(4) NOT NULL DEFAULT '0',
  `trigger_last_time` bigint(13) NOT NULL DEFAULT '0',
  `trigger_next_time` bigint(13) NOT NULL DEFAULT '0',
  PRIMARY KEY (`id`)
) ENGINE=InnoDB AUTO_INCREMENT=9 DEFAULT CHARSET=utf8mb4;
";

    const ROWS: &str = r#"LOCK TABLES `xxl_job_info` WRITE;
INSERT INTO `xxl_job_info` VALUES
(1,1,'对账任务','2024-01-01 00:00:00','2024-01-02 00:00:00','li','ops@example.org','CRON','0 0/30 2-4 ? * 2-6','FIRE_ONCE_NOW','ROUND','settleHandler','{\"date\":\"today\"}','DISCARD_LATER',600,2,'BEAN','','init','2024-01-01 00:00:00','2,3',1,0,0),
(2,1,'report; it\'s late','2024-01-01 00:00:00','2024-01-02 00:00:00','wang','','FIX_RATE','90','DO_NOTHING','FIRST','settleHandler',NULL,'SERIAL_EXECUTION',0,0,'BEAN','','init','2024-01-01 00:00:00','',0,0,0),
(3,2,'clean','2024-01-01 00:00:00','2024-01-02 00:00:00','wang',NULL,'NONE','','DO_NOTHING','SHARDING_BROADCAST','','7','COVER_EARLY',0,0,'GLUE_SHELL','#!/bin/bash\r\necho \"$1\"\nexit 0\n','v1','2024-01-01 00:00:00',NULL,1,0,0);
INSERT INTO `xxl_job_info` VALUES (4,2,'清理','2024-01-01 00:00:00','2024-01-02 00:00:00','zhao','','CRON','0 0 12 1 * 2','DO_NOTHING','FIRST','','','SERIAL_EXECUTION',0,0,'GLUE_GROOVY','class X {}','','2024-01-01 00:00:00','4,99',1,0,0);
UNLOCK TABLES;
"#;

    fn jobs(imported: &Imported) -> Vec<JobSpec> {
        jobfile::parse(&imported.text).unwrap_or_else(|e| panic!("{e}\n{}", imported.text))
    }

    #[test]
    fn a_dump_becomes_a_job_file_that_is_valid() {
        let groups = "INSERT INTO `xxl_job_group` (`id`,`app_name`,`title`) VALUES (1,'settle-executor','x');";
        let imported = xxl_job(&format!("{TABLE}{ROWS}{groups}"), Some("Asia/Shanghai")).unwrap();
        let jobs = jobs(&imported);
        let names: Vec<&str> = jobs.iter().map(|job| job.name.as_str()).collect();
        assert_eq!(names, ["clean", "settlehandler", "settlehandler-2", "xxl-job-4"]);
        let settle = &jobs[1];
        let schedule = settle.schedule.as_ref().unwrap();
        assert_eq!(schedule.cron.as_deref(), Some("0 */30 2-4 ? * 1-5"));
        assert_eq!(schedule.timezone.as_deref(), Some("Asia/Shanghai"));
        assert_eq!(settle.handler, HandlerSpec::Rust { name: "settleHandler".into() });
        assert_eq!((settle.timeout, settle.retry.attempts), (Timeout::After(Span::mins(10)), 3));
        assert_eq!(
            (settle.misfire.policy, settle.params["param"].as_str()),
            (Misfire::FireOnce, Some("{\"date\":\"today\"}"))
        );
        assert_eq!(jobs[2].schedule.as_ref().unwrap().every, Some(Span::secs(90)));
        assert_eq!((jobs[2].timeout, jobs[2].misfire.policy), (Timeout::Never, Misfire::Skip));
        let HandlerSpec::Exec { argv, .. } = &jobs[0].handler else { panic!("{:?}", jobs[0]) };
        assert_eq!(argv[..], ["sh", "-c", "#!/bin/bash\necho \"$1\"\nexit 0\n", "clean", "7"]);
        assert_eq!(jobs[3].schedule, None, "a pattern without a meaning");
        for words in [
            "XXL-JOB 1: 对账任务; executor settle-executor, author li",
            "Alarms went to ops@example.org",
            "shardcron jobs pause settlehandler-2",
            "SHARDING_BROADCAST",
            "0 0/30 2-4 ? * 2-6",
        ] {
            assert!(imported.text.contains(words), "{words}: {}", imported.text);
        }
        assert!(imported.left_out.iter().any(|l| l.contains("both day fields")), "{:?}", imported.left_out);
        assert!(imported.left_out.iter().any(|l| l.contains("GLUE_GROOVY")), "{:?}", imported.left_out);
    }

    /// Policies and children that this version knows are keys; those that it does not know are told with the original.
    #[test]
    fn block_strategies_and_children_are_keys_or_remarks() {
        let imported = xxl_job(&format!("{TABLE}{ROWS}"), None).unwrap();
        for (keys, remark) in [
            ("overlap = \"queue\"", "SERIAL_EXECUTION"),
            ("overlap = \"cancel_running\"", "COVER_EARLY"),
            ("after = [\"settlehandler\"]", "child of settlehandler"),
        ] {
            let known = refusal(keys).is_none();
            assert_eq!(imported.text.contains(keys), known, "{keys}: {}", imported.text);
            assert_eq!(
                imported.left_out.iter().any(|l| l.contains(remark)),
                !known,
                "{remark}: {:?}",
                imported.left_out
            );
        }
        assert!(imported.text.contains("here it is UTC"));
    }

    #[test]
    fn dumps_of_older_versions_and_of_chosen_columns_are_read() {
        let old = "INSERT INTO xxl_job_info (id, job_group, job_cron, job_desc, executor_handler, glue_type) VALUES \
                   (7, 1, '0 0 0 * * ? *', 'demo', 'demoJobHandler', 'BEAN');";
        let imported = xxl_job(old, None).unwrap();
        assert_eq!(jobs(&imported)[0].schedule.as_ref().unwrap().cron.as_deref(), Some("0 0 0 * * ? *"));
        assert!(xxl_job("SELECT 1;", None).unwrap_err().contains("xxl_job_info"));
    }
}
