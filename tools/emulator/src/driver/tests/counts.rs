//! Tests of the lines in the file of counts.

use std::fs;

use serde_json::json;

use super::*;

/// Returns the lines that the calls of `work` append.
fn lines(name: &str, options: Options, work: impl FnOnce()) -> Vec<Value> {
    let file = format!("burn-megatron-emulator-{name}-{}", std::process::id());
    let file = std::env::temp_dir().join(file);
    let turn = fresh(Options {
        counts: Some(file.clone()),
        ..options
    });
    work();
    let text = fs::read_to_string(&file).unwrap();
    drop(turn);
    fs::remove_file(file).unwrap();
    let lines = text.lines().map(serde_json::from_str);
    lines.collect::<Result<_, _>>().unwrap()
}

fn copies_and_waits() {
    let (a, b, stream) = (allocate(64), allocate(64), stream(NON_BLOCKING));
    let pinned = pinned(16);
    // SAFETY: each allocation has 16 bytes and lives until the end.
    unsafe {
        good(cuMemcpyHtoDAsync_v2(a, pinned.cast(), 16, stream));
        good(cuMemsetD32Async(b, 1, 4, stream));
        good(cuMemcpyDtoDAsync_v2(b + 16, a, 8, stream));
        good(cuMemcpyDtoHAsync_v2(pinned.cast(), b, 12, stream));
    }
    good(cuStreamSynchronize(stream));
    let event = event();
    // The event was never recorded, so there is nothing to wait for.
    good(cuEventSynchronize(event));
    good(cuEventRecord(event, stream));
    // A query does not wait.
    let _ = cuEventQuery(event);
    good(cuEventSynchronize(event));
    to_host(a, 4);
    let mut ordinary = [0u8; 2];
    // SAFETY: the buffer has two bytes.
    good(unsafe { cuMemcpyDtoHAsync_v2(ordinary.as_mut_ptr().cast(), a, 2, stream) });
    good(cuCtxSynchronize());
}

/// Checks the order of counts. Work is counted when it is done, and a wait when it begins. With lazy streams, a wait
/// is counted before the work that it waits for.
#[test]
fn copies_fills_and_waits_are_counted() {
    let copy = |way: &str, bytes: u64| json!({ "copy": way, "bytes": bytes });
    let wait = |call: &str| json!({ "wait": call });
    let work = [
        copy("htod", 16),
        json!({ "fill": 16 }),
        copy("dtod", 8),
        copy("dtoh", 12),
    ];
    let rest = [
        wait("cuEventSynchronize"),
        copy("dtoh", 4),
        wait("cuMemcpyDtoH_v2"),
        copy("dtoh", 2),
        wait("cuMemcpyDtoHAsync_v2"),
        wait("cuCtxSynchronize"),
    ];
    let first = [wait("cuStreamSynchronize")];
    let found = lines("eager", Options::default(), copies_and_waits);
    assert_eq!(found, [&work[..], &first, &rest].concat());
    let mut found = lines("lazy", lazy(), copies_and_waits);
    assert_eq!(found[..5], [&first[..], &work].concat());
    // Includes the copies that wait.
    let (mut rest, mut found) = (rest.to_vec(), found.split_off(5));
    let text = |line: &Value| line.to_string();
    rest.sort_by_key(text);
    found.sort_by_key(text);
    assert_eq!(found, rest);
}

#[test]
fn a_launch_is_a_line() {
    let found = lines("launch", Options::default(), || {
        let body = ".visible .entry k()\n{\nret;\n}\n";
        good(launch(kernel(body), [2, 3, 1], [48, 1, 1], 0, null_mut()));
    });
    assert_eq!(found.len(), 1);
    let number = |name: &str| found[0][name].as_u64();
    assert_eq!(found[0]["kernel"], "k");
    assert_eq!(
        [number("warps"), number("longest_warp")],
        [Some(12), Some(1)]
    );
}
