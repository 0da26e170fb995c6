//! Measures the CPU time of programs: `cargo test --release -- --ignored --nocapture speed`.

use crate::machine::{Checks, Counts, Options};
use crate::testing::{kernel, run_with};

/// Returns the CPU time of this thread.
fn seconds() -> f64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the result pointer is valid.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

fn measure(name: &str, body: &str, checks: Checks) {
    let text = format!(
        ".shared .align 16 .b8 s[16384];
         mov.u32 %r0, %tid.x; mov.u32 %r9, s; shl.b32 %r8, %r0, 4; add.u32 %r8, %r8, %r9;
         mul.wide.u32 %d0, %r0, 16; add.s64 %d1, %data, %d0; mov.u32 %r7, 0;
         mov.u32 %r3, 0; mov.u32 %r4, 1; mov.u32 %r5, 2; shl.b32 %r6, %r0, 2; add.u32 %r6, %r6, %r9;
         mov.f32 %f0, 0f3F800000; mov.f32 %f1, 0f3F800000; mov.f32 %f2, 0f3F800000;
         st.shared.v4.f32 [%r8], {{%f0, %f1, %f2, %f0}}; bar.sync 0;
         LOOP: {} add.u32 %r7, %r7, 1; setp.lt.u32 %p1, %r7, 20000; @%p1 bra LOOP;",
        body.repeat(16)
    );
    let program = kernel(&text);
    let mut bytes = vec![0; 1 << 16];
    let options = Options {
        checks,
        ..Options::default()
    };
    let begin = seconds();
    let counts: Counts =
        run_with(&program, [1, 1, 1], [128, 1, 1], &mut bytes, options).expect("it runs");
    let instructions = counts.instructions.iter().sum::<u64>() as f64;
    let rate = instructions / (seconds() - begin) / 1e6;
    println!("{name}: {rate:.1} million instructions of warps a second");
}

#[test]
#[ignore = "measures"]
fn speed() {
    let on = Checks::default();
    let off = Checks {
        races: false,
        unwritten: false,
        ..on
    };
    measure("nothing", "membar.cta;", on);
    measure("fma.f32", "fma.rn.f32 %f2, %f0, %f1, %f2;", on);
    measure("add.u32", "add.u32 %r3, %r4, %r5;", on);
    measure("ld.global.f32", "ld.global.f32 %f3, [%d1];", on);
    measure(
        "ld.global.v4.f32",
        "ld.global.v4.f32 {%f3, %f4, %f5, %f6}, [%d1];",
        on,
    );
    measure(
        "st.global.v4.f32",
        "st.global.v4.f32 [%d1], {%f0, %f1, %f2, %f0};",
        on,
    );
    measure(
        "ld.shared.v4.f32",
        "ld.shared.v4.f32 {%f3, %f4, %f5, %f6}, [%r8];",
        on,
    );
    measure("ld.shared.f32", "ld.shared.f32 %f3, [%r6];", on);
    measure(
        "ld.shared.f32, not checked",
        "ld.shared.f32 %f3, [%r6];",
        off,
    );
    measure(
        "ld.shared.v4.f32, not checked",
        "ld.shared.v4.f32 {%f3, %f4, %f5, %f6}, [%r8];",
        off,
    );
    measure("shfl", "shfl.sync.bfly.b32 %r3, %r4, 1, 31, -1;", on);
}
