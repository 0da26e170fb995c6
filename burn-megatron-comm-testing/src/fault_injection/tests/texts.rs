//! Tests of parsing and printing faults.

use super::*;

#[test]
fn faults_are_written_as_they_are_read() {
    for text in [
        "kill@rank=3,step=5,call=12",
        "delay:2.5s@rank=0,call=3",
        "drop@rank=0,call=0",
        "shape@rank=1,call=9",
        "wrong-call@rank=1,step=0,call=9",
        "nan@rank=1,call=9",
        "panic@rank=1,call=9",
        "error@rank=1,call=9",
        "abort@rank=1,call=9",
        "segfault@rank=1,call=9",
        "stop@rank=1,call=9",
        "terminate@rank=1,call=9",
        "interrupt@rank=1,call=9",
        "spin@rank=1,call=9",
        "never-starts@rank=2",
        "bit-flip:weight:3:9@rank=1,step=2,call=4",
    ] {
        assert_eq!(text.parse::<Fault>().unwrap().to_string(), text);
    }
    let fault: Fault = "delay:100ms@call=3,rank=0".parse().unwrap();
    assert_eq!(fault.kind, FaultKind::Delay(Duration::from_millis(100)));
    assert_eq!(fault.to_string(), "delay:0.1s@rank=0,call=3");
}

#[test]
fn an_invalid_fault_is_refused_with_the_expected_forms() {
    for (text, reason) in [
        ("kill", "@rank=N is missing"),
        ("die@rank=1,call=2", "unknown kind \"die\""),
        ("kill@call=2", "rank is missing"),
        ("kill@rank=1", "call is missing"),
        ("kill@rank=1,step=2", "call is missing"),
        (
            "kill@rank=one,call=2",
            "rank is \"one\", which is not a whole number",
        ),
        (
            "kill@rank=1,call=-2",
            "call is \"-2\", which is not a whole number",
        ),
        ("kill@rank=1,call=2,call=3", "call is given twice"),
        ("kill@rank=1,call", "\"call\" is not KEY=NUMBER"),
        ("kill@rank=1,call=1,at=2", "unknown key \"at\""),
        (
            "delay:2@rank=1,call=1",
            "the time \"2\" requires a unit (s or ms)",
        ),
        ("delay:xs@rank=1,call=1", "\"x\" is not a number"),
        ("delay:-1s@rank=1,call=1", "\"-1s\" is not a duration: "),
        ("delay@rank=1,call=1", "unknown kind \"delay\""),
        (
            "never-starts@rank=1,call=1",
            "never-starts takes neither step nor call",
        ),
    ] {
        let error = text.parse::<Fault>().unwrap_err().to_string();
        let wanted = format!("invalid fault {text:?}: {reason}");
        assert!(error.starts_with(&wanted), "{error}");
        assert!(
            error.contains("KIND@rank=N,step=N,call=N") && error.contains("wrong-call"),
            "{error}"
        );
    }
}
