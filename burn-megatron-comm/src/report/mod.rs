//! Records the calls of each rank for failure reports.

pub(crate) mod call_log;
pub(crate) mod flight_recorder;
pub(crate) mod recorded_call;
