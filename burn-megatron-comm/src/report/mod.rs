//! The calls that each rank has made: the content of a failure report.

pub(crate) mod call_log;
pub(crate) mod flight_recorder;
pub(crate) mod recorded_call;
