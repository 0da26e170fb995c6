//! The network address of the rendezvous server.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use serde::{Serialize, Serializer};

/// A host and a TCP port. An address is written, for example, as `node1:29500`, `10.0.0.1:29500` or `[fd00::1]:29500`.
///
/// The host is not resolved to an IP address. The pair `(host, port)` implements
/// [`ToSocketAddrs`](std::net::ToSocketAddrs).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Address {
    /// A host name, an IPv4 address, or an IPv6 address without brackets.
    pub host: String,
    /// The TCP port, which is never 0.
    pub port: u16,
}

/// The error for a text that is not a valid [`Address`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AddressError {
    /// The host is missing in the address.
    #[error("the host is empty: expected a name such as node1, or an IP address")]
    NoHost,
    /// The host is not followed by a colon and a port.
    #[error("\"{0}\" has no port: expected an address such as node1:29500 or [fd00::1]:29500")]
    NoPort(String),
    /// The port is not a number from 1 to 65535.
    #[error("invalid port \"{0}\": expected 1 to 65535")]
    Port(String),
    /// The host is not a valid name or IP address.
    #[error(
        "invalid host \"{0}\": expected a name of letters, digits, dots and hyphens, or an IP address"
    )]
    Host(String),
}

impl Address {
    /// Creates an address from a host and a port. An IPv6 host may have brackets.
    ///
    /// # Errors
    /// [`AddressError::NoHost`] or [`AddressError::Host`] if the host is invalid, and [`AddressError::Port`] if the
    /// port is 0.
    pub fn new(host: &str, port: u16) -> Result<Address, AddressError> {
        let host = check_host(host)?;
        if port == 0 {
            return Err(AddressError::Port("0".into()));
        }
        Ok(Address { host, port })
    }

    /// Returns whether the host is a loopback name or a loopback address.
    pub fn is_loopback(&self) -> bool {
        is_loopback(&self.host)
    }
}

impl FromStr for Address {
    type Err = AddressError;

    /// Parses an address of the form `host:port`. An IPv6 host requires brackets.
    fn from_str(text: &str) -> Result<Address, AddressError> {
        let no_port = || AddressError::NoPort(text.into());
        let (host, port) = text.rsplit_once(':').ok_or_else(no_port)?;
        // Without brackets, the last group of an IPv6 address would be parsed as the port.
        let bare = host.contains(':') && !host.starts_with('[');
        if bare || port.ends_with(']') {
            return Err(no_port());
        }
        Address::new(host, parse_port(port)?)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, port } = self;
        if host.contains(':') {
            write!(f, "[{host}]:{port}")
        } else {
            write!(f, "{host}:{port}")
        }
    }
}

impl Serialize for Address {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Parses a port in decimal digits.
pub(super) fn parse_port(text: &str) -> Result<u16, AddressError> {
    match text.parse() {
        Ok(port @ 1..) if !text.starts_with('+') => Ok(port),
        _ => Err(AddressError::Port(text.into())),
    }
}

/// Checks a host and returns it without brackets.
pub(super) fn check_host(text: &str) -> Result<String, AddressError> {
    let inner = text
        .strip_prefix('[')
        .and_then(|rest| rest.strip_suffix(']'));
    let is_host = match inner {
        Some(inner) => is_ipv6(inner),
        None => is_ipv6(text) || text.parse::<Ipv4Addr>().is_ok() || is_name(text),
    };
    if text.is_empty() {
        Err(AddressError::NoHost)
    } else if is_host {
        Ok(inner.unwrap_or(text).into())
    } else {
        Err(AddressError::Host(text.into()))
    }
}

/// Returns whether the host is `localhost`, `127.x.x.x` or `::1`.
pub(super) fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse().is_ok_and(|host: IpAddr| host.is_loopback())
}

/// Returns whether the text is an IPv6 address, with an optional zone (interface name) after a `%`.
fn is_ipv6(text: &str) -> bool {
    let (address, zone) = match text.split_once('%') {
        Some((address, zone)) => (address, Some(zone)),
        None => (text, None),
    };
    address.parse::<Ipv6Addr>().is_ok() && zone.is_none_or(is_label)
}

/// Returns whether the text is a host name, which consists of labels with at most 253 characters in total. The last
/// label must not be a number, because such a name would have to be an IPv4 address.
fn is_name(text: &str) -> bool {
    let text = text.strip_suffix('.').unwrap_or(text);
    let numeric = |label: &str| label.bytes().all(|byte| byte.is_ascii_digit());
    let last = text.rsplit('.').next().unwrap_or(text);
    text.len() <= 253 && text.split('.').all(is_label) && !numeric(last)
}

/// Returns whether the text is a label of a host name: 1 to 63 letters, digits and hyphens. The first character must
/// not be a hyphen. Underscores are allowed because some clusters use them.
fn is_label(text: &str) -> bool {
    let is_valid = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
    (1..=63).contains(&text.len()) && text.bytes().all(is_valid) && !text.starts_with('-')
}
