#!/bin/sh
# Links a program. The LLVM functions that the program calls are placed at address 0.
list=$(
    for argument; do
        case $argument in
        */libcubecl_llvm-*.rlib | */libpliron_llvm-*.rlib)
            # `nm` prints errors for members of a library that are not object files.
            nm --undefined-only --format=just-symbols "$argument" 2>/dev/null
            ;;
        esac
    done | sed -n -E 's/^(LLVM|cubecl_)[A-Za-z0-9_]*$/-Wl,--defsym=&=0/p' | sort -u
)
# Names have no spaces, so each word is one argument.
exec cc "$@" $list
