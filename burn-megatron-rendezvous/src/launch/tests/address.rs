//! Tests of addresses.

use super::*;

#[test]
fn addresses_are_read_as_they_are_written() {
    for text in [
        "node1:29500",
        "10.0.0.1:1",
        "[fd00::1]:65535",
        "[fe80::1%eth0]:7",
        "a_b.c-d.e:80",
    ] {
        assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
    }
    let address = Address::new("[fd00::1]", 7).unwrap();
    assert_eq!((address.host.as_str(), address.port), ("fd00::1", 7));
    assert_eq!(Address::new("fd00::1", 7), Ok(address));
}

#[test]
fn invalid_addresses_are_refused() {
    use AddressError::*;
    let error = |text: &str| text.parse::<Address>().unwrap_err();
    assert_eq!(error(""), NoPort("".into()));
    assert_eq!(error("node1"), NoPort("node1".into()));
    assert_eq!(error("[::1]"), NoPort("[::1]".into()));
    assert_eq!(error("::1:80"), NoPort("::1:80".into()));
    assert_eq!(error(":80"), NoHost);
    assert_eq!(error("[]:80"), Host("[]".into()));
    assert_eq!(error("node1:"), Port("".into()));
    assert_eq!(error("node1:+1"), Port("+1".into()));
    assert_eq!(error("node1:65536"), Port("65536".into()));
    assert_eq!(error("1.2.3:80"), Host("1.2.3".into()));
    assert_eq!(error("a..b:80"), Host("a..b".into()));
    assert_eq!(Address::new("node1", 0), Err(Port("0".into())));
    let long = "a".repeat(64);
    assert_eq!(Address::new(&long, 1), Err(Host(long.clone())));
}

#[test]
fn loopback_is_this_machine() {
    let here = |host| Address::new(host, 1).unwrap().is_loopback();
    assert!(here("localhost") && here("127.0.0.1") && here("127.3.2.1") && here("::1"));
    assert!(!here("node1") && !here("10.0.0.1") && !here("fd00::1"));
}
