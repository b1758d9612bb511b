# Completion for fish: copy to ~/.config/fish/completions. It asks fastports itself.
function __fastports_options
    begin
        fastports (commandline -opc)[2] --help 2>/dev/null
        test (commandline -opc)[2] = run; and fastports help supervise
    end | string match -rga '(?:^  |, )(--[a-z_-]+)'
end
# what the option before the word takes; empty where that is anything
function __fastports_values
    set -l line (commandline -opc)
    switch "$line[-1]"
        case --protocol
            printf '%s\n' tcp udp both
        case --restart
            printf '%s\n' always on-failure no
        case --handoff
            test $line[2] = portserver; and printf '%s\n' close door
            or printf '%s\n' auto broker fd bind-door door close
    end
end
complete -c fastports -n __fish_is_first_token -f -a "(fastports --help | string match -rg '^  ([a-z]{2,})  ')"
complete -c fastports -n 'not __fish_is_first_token; and not contains -- -- (commandline -opc)' -a '(__fastports_options)'
complete -c fastports -n 'not __fish_is_first_token; and not contains -- -- (commandline -opc)' -a '(__fastports_values)'
