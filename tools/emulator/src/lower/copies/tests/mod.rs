//! Tests of copies and their barriers with small kernels.

mod tensor;

use crate::machine::Fault;
use crate::testing::{kernel, run_on};

/// The beginning of every kernel. `%r0` is the thread, and `%d1` is the address of the thread's 4-byte word in the
/// buffer. `%r1` is the address of 4 KiB of shared memory, and `%r2` is the address of a barrier behind it.
const HEAD: &str = ".shared .align 1024 .b8 tile[8192];
    mov.u32 %r0, %tid.x;
    mul.wide.u32 %d1, %r0, 4;
    add.u64 %d1, %d1, %data;
    mov.u32 %r1, tile;
    add.u32 %r2, %r1, 4096;
    setp.eq.u32 %p1, %r0, 0;
    ";

fn run(threads: u32, body: &str, words: &mut [u32]) -> Result<(), Fault> {
    let mut bytes: Vec<_> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    let outcome = run_on(&kernel(&format!("{HEAD}{body}")), threads, &mut bytes);
    for (word, bytes) in words.iter_mut().zip(bytes.as_chunks().0) {
        *word = u32::from_le_bytes(*bytes);
    }
    outcome.map(|_| ()).map_err(|failure| failure.fault)
}

/// Returns code that waits for the phase of a parity at `%r2`.
fn wait(label: &str, parity: u32) -> String {
    format!(
        "{label}:\nmbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], {parity};\n@!%p2 bra {label};\n"
    )
}

fn undefined(outcome: Result<(), Fault>, words: &str) {
    match outcome {
        Err(Fault::Undefined(what) | Fault::Deadlock(what)) => {
            assert!(what.contains(words), "{what}")
        }
        other => panic!("{other:?} where {words:?} was expected"),
    }
}

#[test]
fn a_copy_is_done_when_it_is_waited_for() -> Result<(), Fault> {
    let body = "
        mad.lo.u32 %r3, %r0, 16, %r1;
        mov.u32 %r4, 7;
        st.shared.v4.u32 [%r3], {%r4, %r4, %r4, %r4};
        cp.async.ca.shared::cta.global [%r3], [%d1], 4, 4;
        cp.async.commit_group;
        add.u32 %r5, %r3, 4;
        cp.async.ca.shared.global.L2::128B [%r5], [%d1+128], 4;
        cp.async.commit_group;
        add.u32 %r6, %r3, 8;
        cp.async.ca.shared.global [%r6], [%d1+256], 4;
        ld.shared.u32 %r10, [%r3];
        cp.async.wait_group 1;
        ld.shared.u32 %r11, [%r3];
        ld.shared.u32 %r12, [%r3+4];
        cp.async.wait_group 0;
        ld.shared.u32 %r13, [%r3+4];
        ld.shared.u32 %r14, [%r3+8];
        cp.async.wait_all;
        ld.shared.u32 %r15, [%r3+8];
        mul.wide.u32 %d2, %r0, 24;
        add.u64 %d2, %d2, %data;
        st.global.u32 [%d2+384], %r10;
        st.global.u32 [%d2+388], %r11;
        st.global.u32 [%d2+392], %r12;
        st.global.u32 [%d2+396], %r13;
        st.global.u32 [%d2+400], %r14;
        st.global.u32 [%d2+404], %r15;";
    let mut words: Vec<u32> = (0..96 + 6 * 32).map(|word| word + 1000).collect();
    run(32, body, &mut words)?;
    for lane in 0..32 {
        let found = &words[96 + 6 * lane..][..6];
        let lane = lane as u32 + 1000;
        assert_eq!(found, [7, lane, 7, lane + 32, 7, lane + 64], "lane {lane}");
    }
    Ok(())
}

#[test]
fn what_is_not_read_becomes_zero() -> Result<(), Fault> {
    let body = "
        mad.lo.u32 %r3, %r0, 16, %r1;
        mul.wide.u32 %d2, %r0, 16;
        add.u64 %d3, %d2, %data;
        // Lane l reads 0, 4, 6 or 16 bytes.
        cp.async.cg.shared.global [%r3], [%d3], 16, %r0;
        cp.async.wait_all;
        ld.shared.v4.u32 {%r4, %r5, %r6, %r7}, [%r3];
        st.global.v4.u32 [%d3], {%r4, %r5, %r6, %r7};
        cp.async.ca.shared.global [%r3], [%d3], 8, %p1;
        setp.ne.u32 %p3, %r0, 0;
        add.u32 %r8, %r3, 8;
        cp.async.ca.shared.global [%r8], [%d3], 8, !%p3;
        cp.async.wait_all;
        ld.shared.v4.u32 {%r4, %r5, %r6, %r7}, [%r3];
        st.global.v4.u32 [%d3+512], {%r4, %r5, %r6, %r7};";
    let mut words = vec![0x0403_0201; 256];
    run(17, body, &mut words)?;
    let bytes =
        |words: &[u32]| -> Vec<u8> { words.iter().flat_map(|word| word.to_le_bytes()).collect() };
    for lane in 0..17 {
        let wanted: Vec<_> = (0..16)
            .map(|byte| if byte < lane { byte as u8 % 4 + 1 } else { 0 })
            .collect();
        assert_eq!(bytes(&words[4 * lane..][..4]), wanted);
        let skipped = if lane == 0 { &[0; 8][..] } else { &wanted[..8] };
        let wanted = [skipped, skipped].concat();
        assert_eq!(bytes(&words[128 + 4 * lane..][..4]), wanted);
    }
    undefined(run(18, body, &mut words), "17 of 16 bytes");
    Ok(())
}

#[test]
fn copies_arrive_at_barriers() -> Result<(), Fault> {
    for (form, count) in [
        ("cp.async.mbarrier.arrive.noinc.shared.b64 [%r2];", 64),
        (
            "cp.async.mbarrier.arrive.shared::cta.b64 [%r2];\nmbarrier.arrive.shared.b64 _, [%r2];",
            64,
        ),
    ] {
        let wait = wait("W", 0);
        let body = format!(
            "@%p1 mbarrier.init.shared::cta.b64 [%r2], {count};
            mad.lo.u32 %r3, %r0, 4, %r1;
            mov.u32 %r4, 7;
            st.shared.u32 [%r3], %r4;
            bar.sync 0;
            cp.async.ca.shared.global [%r3], [%d1], 4;
            {form}
            ld.shared.u32 %r5, [%r3];
            {wait}
            xor.b32 %r6, %r0, 33;
            mad.lo.u32 %r6, %r6, 4, %r1;
            ld.shared.u32 %r7, [%r6];
            st.global.u32 [%d1+256], %r7;
            st.global.u32 [%d1+512], %r5;"
        );
        let mut words: Vec<u32> = (0..192).collect();
        run(64, &body, &mut words)?;
        for lane in 0..64 {
            assert_eq!((words[64 + lane], words[128 + lane]), (lane as u32 ^ 33, 7));
        }
    }
    Ok(())
}

#[test]
fn phases_follow_each_other() -> Result<(), Fault> {
    // Warp 0 writes, warp 1 reads and tells so by a second barrier; four rounds.
    let body = "
        mov.u32 %r3, 32;
        @%p1 mbarrier.init.shared.b64 [%r2], %r3;
        @%p1 mbarrier.init.shared.b64 [%r2+8], %r3;
        bar.sync 0;
        and.b32 %r4, %r0, 31;
        mad.lo.u32 %r5, %r4, 4, %r1;
        mov.u32 %r6, 0;
        setp.lt.u32 %p3, %r0, 32;
        @%p3 bra WRITE;
        READ:
        and.b32 %r7, %r6, 1;
        R1: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 %p2, [%r2], %r7, 100;
        @!%p2 bra R1;
        ld.shared.u32 %r8, [%r5];
        mul.wide.u32 %d2, %r6, 128;
        add.u64 %d2, %d2, %d1;
        st.global.u32 [%d2-128], %r8;
        mbarrier.arrive.release.cta.shared::cta.b64 _, [%r2+8];
        add.u32 %r6, %r6, 1;
        setp.lt.u32 %p4, %r6, 4;
        @%p4 bra READ;
        ret;
        WRITE:
        // A wait for the phase before the first succeeds at once.
        xor.b32 %r7, %r6, 1;
        and.b32 %r7, %r7, 1;
        W1: mbarrier.test_wait.parity.shared.b64 %p2, [%r2+8], %r7;
        @!%p2 bra W1;
        mad.lo.u32 %r8, %r6, 100, %r4;
        st.shared.u32 [%r5], %r8;
        mbarrier.arrive.shared.b64 %d3, [%r2];
        add.u32 %r6, %r6, 1;
        setp.lt.u32 %p4, %r6, 4;
        @%p4 bra WRITE;
        // The state of the last arrival tells the last phase.
        W2: mbarrier.test_wait.shared.b64 %p2, [%r2], %d3;
        @!%p2 bra W2;
        mbarrier.pending_count.b64 %r9, %d3;
        st.global.u32 [%d1+512], %r9;";
    let mut words = vec![0; 160];
    run(64, body, &mut words)?;
    for round in 0..4 {
        let wanted: Vec<_> = (0..32).map(|lane| round as u32 * 100 + lane).collect();
        assert_eq!(words[32 * round..][..32], wanted);
    }
    let wanted: Vec<_> = (1..=32).rev().collect();
    assert_eq!(words[128..], wanted);
    Ok(())
}

#[test]
fn a_long_wait_is_no_deadlock() {
    let body = "
        @%p1 mbarrier.init.shared.b64 [%r2], 1;
        bar.sync 0;
        mov.u32 %r3, 0;
        setp.lt.u32 %p3, %r0, 32;
        @%p3 bra WAIT;
        LOOP:
        add.u32 %r3, %r3, 1;
        setp.lt.u32 %p4, %r3, 100000;
        @%p4 bra LOOP;
        setp.eq.u32 %p4, %r0, 32;
        @%p4 mbarrier.arrive.shared.b64 _, [%r2];
        ret;
        ";
    assert_eq!(
        run(64, &format!("{body}{}", wait("WAIT", 0)), &mut []),
        Ok(())
    );
}

#[test]
fn barriers_that_are_used_wrongly_are_told() {
    let one = |body: &str| run(1, body, &mut [0; 4]);
    let made = "mbarrier.init.shared.b64 [%r2], 1;\n";
    let none = "mov.u64 %d2, -1;\nst.shared.u64 [%r2], %d2;\n";
    undefined(
        one(&format!("{none}mbarrier.arrive.shared.b64 _, [%r2];")),
        "not an mbarrier",
    );
    undefined(one("mbarrier.init.shared.b64 [%r2], 0;"), "0 arrivals");
    undefined(
        one(&format!("{made}mbarrier.arrive.shared.b64 _, [%r2], 2;")),
        "2 arrive where 1",
    );
    undefined(
        one(&format!(
            "{made}mbarrier.inval.shared.b64 [%r2];\nmbarrier.arrive.shared.b64 _, [%r2];"
        )),
        "not an mbarrier",
    );
    undefined(
        one(&format!(
            "{made}mbarrier.arrive.noComplete.shared.b64 %d2, [%r2], 1;"
        )),
        "completes",
    );
    undefined(
        one(&format!("{made}{}", wait("W", 0))),
        "1 of 1 arrivals and 0 bytes",
    );
    let anew = format!("{made}cp.async.mbarrier.arrive.shared.b64 [%r2];\n{made}");
    undefined(one(&anew), "made anew");
    let short = format!(
        "{made}mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 64;\n{}",
        wait("W", 0)
    );
    undefined(one(&short), "1 arrivals and 64 bytes");
    let given = short.replace(
        "W:",
        "mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r2], 64;\nW:",
    );
    assert_eq!(one(&given), Ok(()));
    // One of two threads drops out, so the second phase needs one arrival.
    let dropped = format!(
        "mbarrier.init.shared.b64 [%r2], 2;\nmbarrier.arrive_drop.shared.b64 _, [%r2];\n\
         mbarrier.arrive.shared.b64 _, [%r2];\nmbarrier.arrive.shared.b64 _, [%r2];\n{}",
        wait("W", 1)
    );
    assert_eq!(one(&dropped), Ok(()));
    undefined(one(&dropped.replace("_drop", "")), "1 of 2 arrivals");
}

#[test]
fn bulk_copies_come_and_go() -> Result<(), Fault> {
    let body = format!(
        "@!%p1 bra DONE;
        mbarrier.init.shared.b64 [%r2], 1;
        fence.mbarrier_init.release.cluster;
        mov.u32 %r3, 7;
        st.shared.u32 [%r1], %r3;
        mov.u32 %r4, 256;
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%data], %r4, [%r2];
        ld.shared.u32 %r5, [%r1];
        mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%r2], %r4;
        {}
        ld.shared.u32 %r6, [%r1];
        fence.proxy.async.shared::cta;
        cp.async.bulk.global.shared::cta.bulk_group [%data+512], [%r1], %r4;
        cp.async.bulk.commit_group;
        cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%data+256], [%r1], %r4;
        cp.async.bulk.commit_group;
        cp.async.bulk.wait_group.read 1;
        // The first one's source is read, so that it may change; nothing is written.
        mov.u32 %r7, 77;
        st.shared.u32 [%r1], %r7;
        ld.global.u32 %r8, [%data+512];
        cp.async.bulk.wait_group 1;
        ld.global.u32 %r9, [%data+512];
        ld.global.u32 %r10, [%data+256];
        cp.async.bulk.wait_group.read 0;
        cp.async.bulk.wait_group 1;
        ld.global.u32 %r11, [%data+256];
        st.global.v4.u32 [%data+768], {{%r5, %r6, %r8, %r9}};
        st.global.v2.u32 [%data+784], {{%r10, %r11}};
        DONE:",
        wait("W", 0)
    );
    let mut words: Vec<u32> = (1000..1256).collect();
    run(32, &body, &mut words)?;
    assert_eq!(words[192..198], [7, 1000, 1128, 1000, 1064, 1064]);
    assert_eq!(words[128..192], (1000..1064).collect::<Vec<_>>());
    // The second copy is written only at the end of the block.
    assert_eq!(words[64], 1064 + 77);
    assert_eq!(
        words[65..128],
        (1..64).map(|word| 2064 + 2 * word).collect::<Vec<u32>>()
    );
    Ok(())
}

#[test]
fn a_block_does_not_end_before_its_copies() {
    let load = "mbarrier.init.shared.b64 [%r2], 1;
        cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%data], 64, [%r2];";
    undefined(run(1, load, &mut [0; 16]), "ends before");
    let store = "mov.u32 %r3, 0;
        st.shared.v4.u32 [%r1], {%r3, %r3, %r3, %r3};
        cp.async.bulk.global.shared::cta.bulk_group [%data], [%r1], 16;
        cp.async.bulk.commit_group;";
    undefined(run(1, store, &mut [0; 16]), "ends before");
    assert_eq!(
        run(
            1,
            &format!("{store}\ncp.async.bulk.wait_group.read 0;"),
            &mut [0; 16]
        ),
        Ok(())
    );
    let far = "cp.async.bulk.global.shared::cta.bulk_group [%data+16], [%r1], 64;";
    assert!(matches!(
        run(1, far, &mut [0; 16]),
        Err(Fault::Address { .. })
    ));
    let others = load.replace(
        "bytes [%r1], [%data], 64, [%r2];",
        "bytes.multicast::cluster [%r1], [%data], 64, [%r2], 3;",
    );
    undefined(run(1, &others, &mut [0; 16]), "cluster of one");
    let odd = "cp.async.bulk.global.shared::cta.bulk_group [%data], [%r1], 24;";
    undefined(run(1, odd, &mut [0; 16]), "multiple of 16");
}

#[test]
fn a_cluster_is_one_block() -> Result<(), Fault> {
    let body = "
        mov.u32 %r3, %cluster_ctarank;
        mov.u32 %r4, %cluster_nctarank;
        mapa.shared::cluster.u32 %r5, %r1, %r3;
        mad.lo.u32 %r6, %r0, 4, %r5;
        st.shared.u32 [%r6], %r0;
        barrier.cluster.arrive.release.aligned;
        barrier.cluster.wait.acquire.aligned;
        xor.b32 %r7, %r0, 32;
        mad.lo.u32 %r7, %r7, 4, %r1;
        ld.shared.u32 %r8, [%r7];
        add.u32 %r8, %r8, %r4;
        griddepcontrol.wait;
        st.global.u32 [%d1], %r8;";
    let mut words = vec![0; 64];
    run(64, body, &mut words)?;
    assert!(
        words
            .iter()
            .enumerate()
            .all(|(lane, word)| *word == (lane as u32 ^ 32) + 1)
    );
    undefined(
        run(1, "mapa.shared::cluster.u32 %r5, %r1, 1;", &mut []),
        "cluster of one",
    );
    Ok(())
}
