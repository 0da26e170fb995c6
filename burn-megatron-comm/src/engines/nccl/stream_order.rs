//! The order between collectives and the computation on the device.

use std::env::{self, VarError};

/// The environment variable that selects the order, for tests and debugging.
pub(super) const VARIABLE: &str = "BURN_MEGATRON_NCCL_ORDER";

/// The method that synchronizes a collective with the computation on the device. It determines how the collective waits
/// for its input, and how readers of the result wait for the collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::Display, strum::EnumString)]
#[strum(serialize_all = "lowercase")]
pub(crate) enum StreamOrder {
    /// Uses events on the stream of CubeCL. Only readers of the result wait for the collective.
    Stream,
    /// Uses events of the whole CUDA context. All later work on the device waits for the collective.
    Context,
    /// The host waits for the device before and after the collective.
    Host,
}

/// Returns the order that the environment variable selects, or `None` if the variable is not set.
///
/// # Errors
/// A message if the value is not an order.
pub(super) fn from_env() -> Result<Option<StreamOrder>, String> {
    read(env::var(VARIABLE))
}

fn read(value: Result<String, VarError>) -> Result<Option<StreamOrder>, String> {
    let value = match value {
        Ok(value) => value,
        Err(VarError::NotPresent) => return Ok(None),
        Err(VarError::NotUnicode(value)) => value.to_string_lossy().into_owned(),
    };
    let order = value.parse().map(Some);
    order.map_err(|_| format!("invalid {VARIABLE} {value:?}: expected stream, context or host"))
}

/// Returns the requested order. Without a request, returns the first available order, with the reasons why earlier
/// orders are not available.
///
/// `probe` checks whether an order is available. `Host` is always available.
///
/// # Errors
/// The reason why the requested order is not available.
pub(super) fn choose(
    requested: Option<StreamOrder>,
    probe: impl Fn(StreamOrder) -> Result<(), String>,
) -> Result<(StreamOrder, Vec<String>), String> {
    if let Some(order) = requested {
        let missing = |reason| {
            format!("{VARIABLE} selects the order \"{order}\", which is not available: {reason}")
        };
        return probe(order).map(|()| (order, vec![])).map_err(missing);
    }
    let mut reasons = vec![];
    for order in [StreamOrder::Stream, StreamOrder::Context] {
        match probe(order) {
            Ok(()) => return Ok((order, reasons)),
            Err(reason) => reasons.push(format!("{order}: {reason}")),
        }
    }
    Ok((StreamOrder::Host, reasons))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_is_read_as_it_is_written() {
        assert_eq!(read(Err(VarError::NotPresent)), Ok(None));
        for order in [StreamOrder::Stream, StreamOrder::Context, StreamOrder::Host] {
            assert_eq!(read(Ok(order.to_string())), Ok(Some(order)));
        }
        let message = read(Ok("events".into())).unwrap_err();
        for part in [VARIABLE, "\"events\"", "stream, context or host"] {
            assert!(message.contains(part), "{message}");
        }
    }

    #[test]
    fn the_first_that_is_there_is_taken() {
        let but = |missing: &'static [StreamOrder]| {
            move |order| {
                if missing.contains(&order) {
                    Err("no".to_string())
                } else {
                    Ok(())
                }
            }
        };
        let chosen = |missing| choose(None, but(missing)).unwrap();
        assert_eq!(chosen(&[]), (StreamOrder::Stream, vec![]));
        let (order, reasons) = chosen(&[StreamOrder::Stream]);
        assert_eq!((order, reasons.len()), (StreamOrder::Context, 1));
        let (order, reasons) = chosen(&[StreamOrder::Stream, StreamOrder::Context]);
        assert_eq!(order, StreamOrder::Host);
        assert_eq!(reasons, ["stream: no", "context: no"]);
    }

    #[test]
    fn what_is_asked_for_is_not_replaced() {
        let none = |order| match order {
            StreamOrder::Context => Err("no driver support".to_string()),
            _ => Ok(()),
        };
        assert_eq!(
            choose(Some(StreamOrder::Host), none),
            Ok((StreamOrder::Host, vec![]))
        );
        let message = choose(Some(StreamOrder::Context), none).unwrap_err();
        assert!(message.contains("\"context\"") && message.contains("no driver"));
    }
}
