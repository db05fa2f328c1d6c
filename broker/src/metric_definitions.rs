//! Every metric of this crate: its name, and what it counts. Labels are bounded: tiers, outcomes, kinds.

/// Messages by what became of their publish. Labels `tier`, `outcome` (`confirmed`, `unroutable`, `failed`).
pub const PUBLISHED: &str = "shardcron_broker_published_total";
/// Messages that wait for their confirm.
pub const IN_FLIGHT: &str = "shardcron_broker_unconfirmed";
/// Deliveries that came in. Labels `tier`, `kind` (`first`, `again`, `unreadable`).
pub const DELIVERIES: &str = "shardcron_broker_deliveries_total";
/// Acknowledgement frames. Label `kind` (`single`, `multiple`, `requeue`).
pub const ACK_FRAMES: &str = "shardcron_broker_ack_frames_total";
/// Triggers that came in.
pub const TRIGGERS: &str = "shardcron_broker_triggers_total";
/// Messages that were put into the dead letter queue by this process.
pub const DEAD: &str = "shardcron_broker_dead_total";
/// Connections that were made anew. Label `connection` (`publish`, `consume`).
pub const RECONNECTS: &str = "shardcron_broker_reconnects_total";
/// Channels of consumers that were made anew. Label `queue` (`shards`, `triggers`).
pub const RENEWALS: &str = "shardcron_broker_consumer_renewals_total";
/// Queues that did not answer a consumer although the server was there. Label `queue` (`shards`, `triggers`).
pub const SILENT: &str = "shardcron_broker_queue_silent_total";
/// 0 away, 1 blocked, 2 up. Label `broker`.
pub const STATE: &str = "shardcron_broker_state";

/// Registers the descriptions; call once, after the recorder is installed.
pub fn describe() {
    metrics::describe_counter!(PUBLISHED, "messages by what became of their publish");
    metrics::describe_gauge!(IN_FLIGHT, "messages that wait for their confirm");
    metrics::describe_counter!(DELIVERIES, "deliveries that came in");
    metrics::describe_counter!(ACK_FRAMES, "acknowledgement frames sent");
    metrics::describe_counter!(TRIGGERS, "triggers that came in");
    metrics::describe_counter!(DEAD, "messages put into the dead letter queue by this process");
    metrics::describe_counter!(RECONNECTS, "connections to the broker that were made anew");
    metrics::describe_counter!(RENEWALS, "consumers' channels that were made anew");
    metrics::describe_counter!(SILENT, "queues that did not answer a consumer although the server was there");
    metrics::describe_gauge!(STATE, "0 away, 1 blocked, 2 up");
}
